// @ts-check
// A form made from a JSON schema of the API's OpenAPI document. It edits a plain value in place of which a new
// one is given to `onChange`; a field that is left empty is left out, and shows its default.
import { html, nothing, live } from "./lit.js";
import { t } from "./messages.js";
import { request } from "./api.js";

/** @type {Promise<any> | null} */
let loading = null;

/** @returns {Promise<Record<string, any>>} the schemas of the API by name */
export function loadSchemas() {
  if (!loading) {
    loading = request("GET", "/openapi.json").then((document) => document.components.schemas);
    loading.catch(() => {
      loading = null;
    });
  }
  return loading;
}

/**
 * @typedef {object} FormOptions
 * @property {Record<string, any>} schemas
 * @property {(value: any) => void} onChange gets the whole value
 * @property {(path: string) => string | undefined} [errorOf]
 * @property {Record<string, (field: Field) => unknown>} [widgets] instead of the schema's own, by path
 * @property {string[]} [open] paths of the groups that are open at first
 * @property {string} [prefix] of the ids of fields
 *
 * @typedef {object} Field
 * @property {string} path
 * @property {string} name
 * @property {any} schema
 * @property {any} value
 * @property {boolean} isRequired
 * @property {(value: any) => void} set
 * @property {string} id
 */

/** @param {any} schema @param {any} value @param {FormOptions} options */
export function schemaForm(schema, value, options) {
  return properties(resolve(schema, options.schemas), value || {}, "", options.onChange, options);
}

/** @param {any} schema @param {Record<string, any>} schemas */
export function resolve(schema, schemas) {
  let found = schema;
  while (found.$ref || (found.allOf && found.allOf.length === 1)) {
    const target = found.$ref ? schemas[found.$ref.split("/").pop()] : found.allOf[0];
    const { $ref, allOf, ...own } = found;
    found = { ...target, ...own };
  }
  return found;
}

/** @param {any} schema @param {Record<string, any>} schemas @returns {any[]} its forms, without null */
function variants(schema, schemas) {
  const found = resolve(schema, schemas);
  const forms = found.anyOf || found.oneOf;
  if (!forms) return [found];
  const { anyOf, oneOf, ...own } = found;
  return forms.map((/** @type {any} */ form) => ({ ...own, ...resolve(form, schemas) }))
    .filter((/** @type {any} */ form) => form.type !== "null");
}

/**
 * @param {any} schema @param {any} value @param {string} path @param {(value: any) => void} set
 * @param {FormOptions} options
 * @returns {unknown}
 */
function properties(schema, value, path, set, options) {
  return Object.entries(schema.properties || {}).map(([name, property]) => {
    const own = path ? `${path}.${name}` : name;
    return fieldView({
      path: own, name, schema: property, value: value[name],
      isRequired: (schema.required || []).includes(name),
      id: `${options.prefix || "field"}-${own.replaceAll(".", "-")}`,
      set: (/** @type {any} */ changed) => {
        const next = { ...value };
        if (changed === undefined) delete next[name];
        else next[name] = changed;
        set(next);
      },
    }, options);
  });
}

/** @param {Field} field @param {FormOptions} options @returns {unknown} */
function fieldView(field, options) {
  const widget = options.widgets && options.widgets[field.path];
  if (widget) return widget(field);
  const forms = variants(field.schema, options.schemas);
  if (forms.length === 1 && forms[0].const !== undefined) return nothing;
  if (forms.length === 1) return formView(field, forms[0], options);
  return unionView(field, forms, options);
}

/** @param {Field} field @param {any} schema @param {FormOptions} options @returns {unknown} */
function formView(field, schema, options) {
  if (schema.properties) return groupView(field, schema, options);
  if (schema.enum) return selectView(field, schema, schema.enum, options);
  if (schema.type === "boolean") return selectView(field, schema, [true, false], options);
  if (schema.type === "integer" || schema.type === "number") return numberView(field, schema, options);
  if (schema.type === "array") return listView(field, schema, options);
  if (schema.type === "object") return jsonView(field, schema, options);
  return textView(field, schema, options);
}

/** @param {Field} field @param {any} schema @param {FormOptions} options */
function groupView(field, schema, options) {
  const isOpen = (options.open || []).includes(field.path) || field.value !== undefined;
  return html`<details class="group" ?open=${isOpen}><summary><code>${field.name}</code>
    <span class="small">${firstSentence(schema.description)}</span></summary>
    <div class="fields">${properties(schema, field.value || {}, field.path,
      (value) => field.set(Object.keys(value).length || field.isRequired ? value : undefined), options)}</div></details>`;
}

/**
 * Several forms: words and sizes in one field, else a choice of the form and its own fields.
 * @param {Field} field @param {any[]} forms @param {FormOptions} options
 */
function unionView(field, forms, options) {
  const words = forms.filter((form) => form.const !== undefined || form.enum)
    .flatMap((form) => form.enum || [form.const]);
  const scalar = forms.find((form) => form.type === "integer" || form.type === "number");
  if (scalar && forms.every((form) => form === scalar || form.const !== undefined || form.enum)) {
    return textView(field, { ...scalar, description: `${scalar.description || ""} ${words.join(", ")}` }, options, (text) => {
      if (text === "") return undefined;
      return words.includes(text) || Number.isNaN(Number(text)) ? text : Number(text);
    });
  }
  const object = forms.find((form) => form.properties);
  if (!object) return textView(field, forms[0], options);
  const isObject = typeof field.value === "object" && field.value !== null;
  const choices = [...words, t("form.own")];
  return html`${shell(field, object, options, html`<select id=${field.id} @change=${(/** @type {any} */ e) => {
    const chosen = e.target.value;
    field.set(chosen === "" ? undefined : chosen === choices[choices.length - 1] ? {} : chosen);
  }}>
    <option value="" ?selected=${field.value === undefined}>${defaultText(field.schema)}</option>
    ${choices.map((each, index) => html`<option value=${each} ?selected=${
      index === choices.length - 1 ? isObject : field.value === each}>${each}</option>`)}</select>`)}
    ${isObject ? html`<div class="fields nested">${properties(object, field.value, field.path, field.set, options)}</div>`
      : nothing}`;
}

/** @param {Field} field @param {any} schema @param {any[]} values @param {FormOptions} options */
function selectView(field, schema, values, options) {
  return shell(field, schema, options, html`<select id=${field.id} aria-describedby=${`${field.id}-hint`}
    @change=${(/** @type {any} */ e) => field.set(e.target.value === "" ? undefined : values[Number(e.target.value)])}>
    <option value="" ?selected=${field.value === undefined || field.value === null}>${defaultText(schema)}</option>
    ${values.map((each, index) => html`<option value=${index} ?selected=${field.value === each}>${String(each)}</option>`)}
  </select>`);
}

/** @param {Field} field @param {any} schema @param {FormOptions} options */
function numberView(field, schema, options) {
  return shell(field, schema, options, html`<input id=${field.id} type="number" step="any"
    aria-describedby=${`${field.id}-hint`} placeholder=${defaultText(schema)}
    min=${schema.minimum ?? schema.exclusiveMinimum ?? nothing} max=${schema.maximum ?? schema.exclusiveMaximum ?? nothing}
    .value=${live(field.value === undefined || field.value === null ? "" : String(field.value))}
    @input=${(/** @type {any} */ e) => {
      if (e.target.validity.badInput) return;
      field.set(e.target.value === "" ? undefined : Number(e.target.value));
    }}>`);
}

/**
 * @param {Field} field @param {any} schema @param {FormOptions} options
 * @param {(text: string) => any} [parse]
 */
function textView(field, schema, options, parse = (text) => (text === "" ? undefined : text)) {
  return shell(field, schema, options, html`<input id=${field.id} type="text" autocomplete="off"
    aria-describedby=${`${field.id}-hint`} placeholder=${defaultText(schema)} maxlength=${schema.maxLength ?? nothing}
    .value=${live(field.value === undefined || field.value === null ? "" : String(field.value))}
    @input=${(/** @type {any} */ e) => field.set(parse(e.target.value))}>`);
}

/** @param {Field} field @param {any} schema @param {FormOptions} options a list in one field, by commas */
function listView(field, schema, options) {
  const items = resolve(schema.items || {}, options.schemas);
  const isNumber = items.type === "integer" || items.type === "number";
  return shell(field, schema, options, html`<input id=${field.id} type="text" autocomplete="off"
    aria-describedby=${`${field.id}-hint`} placeholder=${t("form.list")} .value=${(field.value || []).join(", ")}
    @change=${(/** @type {any} */ e) => {
      const parts = e.target.value.split(",").map((/** @type {string} */ part) => part.trim()).filter(Boolean);
      field.set(parts.length ? (isNumber ? parts.map(Number) : parts) : undefined);
    }}>`);
}

/** @param {Field} field @param {any} schema @param {FormOptions} options */
function jsonView(field, schema, options) {
  return shell(field, schema, options, html`<textarea id=${field.id} rows="3" spellcheck="false"
    aria-describedby=${`${field.id}-hint`} placeholder="{}"
    .value=${field.value === undefined ? "" : JSON.stringify(field.value)}
    @change=${(/** @type {any} */ e) => {
      try {
        field.set(e.target.value.trim() ? JSON.parse(e.target.value) : undefined);
        e.target.setCustomValidity("");
      } catch {
        e.target.setCustomValidity(t("form.not_json"));
        e.target.reportValidity();
      }
    }}></textarea>`);
}

/** @param {Field} field @param {any} schema @param {FormOptions} options @param {unknown} control */
export function shell(field, schema, options, control) {
  const error = options.errorOf && options.errorOf(field.path);
  return html`<div class=${error ? "field invalid" : "field"}>
    <label for=${field.id}><code>${field.name}</code>${field.isRequired ? html`<span class="required"> *</span>` : nothing}</label>
    ${control}
    <span class="small" id=${`${field.id}-hint`}>${schema.description || ""}${bounds(schema)}</span>
    ${error ? html`<span class="error" role="alert">${error}</span>` : nothing}
  </div>`;
}

/** @param {any} schema */
function bounds(schema) {
  const low = schema.minimum ?? schema.exclusiveMinimum;
  const high = schema.maximum ?? schema.exclusiveMaximum;
  if (low === undefined && high === undefined) return "";
  return ` (${low ?? "−∞"} … ${high ?? "∞"})`;
}

/** @param {any} schema */
function defaultText(schema) {
  const value = schema.default;
  if (value === undefined || value === null) return t("form.default");
  return t("form.default_is", { value: typeof value === "object" ? JSON.stringify(value) : String(value) });
}

/** @param {string | undefined} text */
function firstSentence(text) {
  return text ? text.split("\n")[0] : "";
}
