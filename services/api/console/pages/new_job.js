// @ts-check
// A new job: a form made from the API's own schema, its JSON beside it, and the memory plan as one types.
import { html, nothing } from "../lit.js";
import { t, known } from "../messages.js";
import { request, curl, Problem } from "../api.js";
import { bytes } from "../format.js";
import { Actions, actionView, idempotencyKey, partsOf, problemView, stackedBar, verdictView } from "../parts.js";
import { loadSchemas, schemaForm, shell } from "../schema_form.js";

const DRAFT = "new-job";
const PLAN_MILLISECONDS = 400;
const SPECS = /** @type {Record<string, string>} */ ({ teacher: "TeacherSpec", distill: "DistillSpec", chain: "ChainSpec" });
const SOURCES = ["path", "model_id", "config", "layers_of_teacher"];

/** @param {import("../main.js").Context} context @returns {import("../main.js").Page} */
export function create(context) {
  return new NewJobPage(context);
}

class NewJobPage {
  /** @param {import("../main.js").Context} context */
  constructor(context) {
    this.context = context;
    /** @type {any} */
    this.spec = readDraft();
    this.text = JSON.stringify(this.spec, null, 2);
    this.textError = "";
    /** @type {any} */
    this.schemas = null;
    /** @type {any[]} */
    this.datasets = [];
    /** @type {any[]} */
    this.baseModels = [];
    /** @type {any[]} */
    this.models = [];
    /** @type {any[]} */
    this.devices = [];
    /** @type {any} */
    this.plan = null;
    /** @type {any} */
    this.planProblem = null;
    this.isPlanning = false;
    this.planTimer = 0;
    /** @type {AbortController | null} */
    this.planning = null;
    this.problem = /** @type {any} */ (null);
    this.actions = new Actions();
    this.key = idempotencyKey();
    this.load();
  }

  stop() {
    clearTimeout(this.planTimer);
    if (this.planning) this.planning.abort();
  }

  async load() {
    try {
      const former = this.context.query.get("from");
      const dataset = this.context.query.get("dataset");
      const [schemas, datasets, baseModels, models, devices, job] = await Promise.all([
        loadSchemas(), request("GET", "/datasets?limit=100"), request("GET", "/base-models"),
        request("GET", "/models?limit=100"), request("GET", "/devices"),
        former ? request("GET", `/jobs/${former}`) : null,
      ]);
      this.schemas = schemas;
      this.datasets = datasets.items;
      this.baseModels = baseModels.items;
      this.models = models.items;
      this.devices = devices.items;
      if (job) this.set(withoutDefaults(job.spec));
      else if (dataset) this.set({ ...this.spec, dataset_id: dataset });
      if (job || dataset) this.context.setQuery({ from: null, dataset: null });
    } catch (error) {
      this.problem = error;
    }
    this.schedulePlan();
    this.context.update();
  }

  /** @param {any} spec of the form, or of a button */
  set(spec) {
    this.spec = spec;
    this.text = JSON.stringify(spec, null, 2);
    this.textError = "";
    this.changed();
  }

  /** @param {string} text of the JSON view */
  setText(text) {
    this.text = text;
    try {
      const spec = JSON.parse(text);
      if (typeof spec !== "object" || spec === null || Array.isArray(spec)) throw new SyntaxError();
      this.spec = spec;
      this.textError = "";
      this.changed();
    } catch {
      this.textError = t("form.not_json");
      this.context.update();
    }
  }

  changed() {
    this.key = idempotencyKey();
    this.actions.problem = null;
    try {
      localStorage.setItem(DRAFT, JSON.stringify(this.spec));
    } catch {
      // A browser that stores nothing still sends the form.
    }
    this.schedulePlan();
    this.context.update();
  }

  schedulePlan() {
    clearTimeout(this.planTimer);
    this.planTimer = setTimeout(() => this.planNow(), PLAN_MILLISECONDS);
  }

  async planNow() {
    if (this.planning) this.planning.abort();
    if (!this.isReady()) return;
    const planning = (this.planning = new AbortController());
    this.isPlanning = true;
    this.context.update();
    try {
      this.plan = await request("POST", "/jobs/plan", { json: this.spec, signal: planning.signal });
      this.planProblem = null;
    } catch (error) {
      if (planning.signal.aborted) return;
      this.planProblem = error;
      if (!(error instanceof Problem) || error.status === 422) this.plan = null;
      if (error instanceof Problem && (error.status === 0 || error.status >= 500)) this.planTimer = setTimeout(() => this.planNow(), 3000);
    }
    this.isPlanning = false;
    this.context.update();
  }

  /** Whether enough is there for a plan: the rest is told by the server's answer. */
  isReady() {
    const teacher = this.spec.kind === "chain" ? this.spec.teacher || {} : this.spec;
    const model = teacher.kind === "distill" ? teacher.student : teacher.model;
    return Boolean(teacher.dataset_id && model);
  }

  async submit() {
    const job = await request("POST", "/jobs", { json: this.spec, headers: { "Idempotency-Key": this.key } });
    localStorage.removeItem(DRAFT);
    location.hash = `#/job/${job.id}`;
  }

  clear() {
    this.plan = null;
    this.planProblem = null;
    this.set({ kind: "teacher" });
  }

  /** @param {string} path @returns {string | undefined} */
  errorOf(path) {
    for (const problem of [this.actions.problem, this.planProblem]) {
      const found = problem instanceof Problem ? problem.of(path) : undefined;
      if (found) return found;
    }
    return undefined;
  }

  render() {
    if (this.problem) return html`<h1>${t("nav.new")}</h1>${problemView(this.problem)}`;
    if (!this.schemas) return html`<h1>${t("nav.new")}</h1><p aria-busy="true">${t("loading")}</p>`;
    return html`<h1>${t("nav.new")}</h1>
      <div class="split">
        <form class="panel" @submit=${(/** @type {Event} */ e) => e.preventDefault()}>${this.form()}</form>
        <div class="sticky">${this.planView()}${this.jsonView()}</div>
      </div>`;
  }

  form() {
    const kind = this.spec.kind || "teacher";
    return html`
      <div class="field"><label for="kind"><code>kind</code></label>
        <select id="kind" @change=${(/** @type {any} */ e) => this.set(converted(this.spec, e.target.value))}>
          ${Object.keys(SPECS).map((each) => html`<option value=${each} ?selected=${kind === each}>${t(`kind.${each}`)}</option>`)}
        </select></div>
      <div class="fields">${schemaForm(this.schemas[SPECS[kind]], this.spec, {
        schemas: this.schemas, open: ["model", "student", "teacher", "distill", "resources"],
        onChange: (value) => this.set(value), errorOf: (path) => this.errorOf(path), widgets: this.widgets() })}</div>
      ${this.actions.render()}
      ${actionView({ label: t("new.submit"), kind: "primary", run: () => this.submit(), disabled: Boolean(this.textError),
        command: curl("POST", "/jobs", this.spec) }, this.actions)}
      <button type="button" @click=${() => this.clear()}>${t("new.clear")}</button>`;
  }

  /** @returns {Record<string, (field: import("../schema_form.js").Field) => unknown>} */
  widgets() {
    /** @type {Record<string, any>} */
    const found = {};
    for (const prefix of ["", "teacher.", "distill."]) {
      found[`${prefix}dataset_id`] = (/** @type {any} */ field) => this.datasetView(field);
      found[`${prefix}heads`] = (/** @type {any} */ field) => this.headsView(field);
      found[`${prefix}resources.device`] = (/** @type {any} */ field) => this.choiceView(field, this.devices.map(
        (each) => [each.name, `${each.name} · ${bytes(each.memory_bytes)}`]));
      for (const model of ["model", "student"]) {
        found[`${prefix}${model}`] = (/** @type {any} */ field) => this.sourceView(field);
      }
    }
    if (this.spec.kind === "distill") found.teacher = (/** @type {any} */ field) => this.teacherView(field);
    return found;
  }

  /** @param {import("../schema_form.js").Field} field */
  datasetView(field) {
    return this.choiceView(field, this.datasets.map((each) => [each.id, `${each.name} (${each.heads.map(
      (/** @type {any} */ head) => head.name).join(", ") || t("datasets.unlabelled")})`]));
  }

  /** @param {import("../schema_form.js").Field} field @param {string[][]} choices values and their labels */
  choiceView(field, choices) {
    const isKnown = choices.some(([value]) => value === field.value);
    return shell(field, field.schema, this.options(), html`<select id=${field.id}
      @change=${(/** @type {any} */ e) => field.set(e.target.value || undefined)}>
      <option value="" ?selected=${!field.value}>${t("new.choose")}</option>
      ${field.value && !isKnown ? html`<option value=${field.value} selected>${field.value}</option>` : nothing}
      ${choices.map(([value, label]) => html`<option value=${value} ?selected=${field.value === value}>${label}</option>`)}
    </select>`);
  }

  /** @returns {any} */
  options() {
    return { schemas: this.schemas, onChange: () => {}, errorOf: (/** @type {string} */ path) => this.errorOf(path) };
  }

  /** @param {import("../schema_form.js").Field} field */
  headsView(field) {
    const owner = field.path.startsWith("teacher.") ? this.spec.teacher : field.path.startsWith("distill.") ? this.spec.distill : this.spec;
    const id = (owner && owner.dataset_id) || (this.spec.teacher && this.spec.teacher.dataset_id);
    const dataset = this.datasets.find((each) => each.id === id);
    if (!dataset || !dataset.heads.length) return nothing;
    const chosen = field.value || dataset.heads.map((/** @type {any} */ head) => head.name);
    return html`<fieldset><legend><code>heads</code></legend>${dataset.heads.map((/** @type {any} */ head) => html`<label>
      <input type="checkbox" ?checked=${chosen.includes(head.name)} @change=${(/** @type {any} */ e) => {
        const next = dataset.heads.map((/** @type {any} */ each) => each.name).filter((/** @type {string} */ name) =>
          (name === head.name ? e.target.checked : chosen.includes(name)));
        field.set(next.length === dataset.heads.length || !next.length ? undefined : next);
      }}> ${head.name} <span class="small">${head.labels.length}</span></label> `)}</fieldset>`;
  }

  /** Where weights come from: one of four, which the schema cannot say. @param {import("../schema_form.js").Field} field */
  sourceView(field) {
    const value = field.value || {};
    const source = SOURCES.find((each) => value[each] !== undefined) || "path";
    const isStudent = field.name === "student";
    const choices = SOURCES.filter((each) => isStudent || each !== "layers_of_teacher");
    const paths = this.baseModels.map((each) => [each.path, `${each.path} · ${each.model_type || "?"} · ${bytes(each.size_bytes)}`]);
    const models = this.models.map((each) => [each.id, `${each.name || each.id} · ${t(`kind.${each.kind}`)}`]);
    return html`<fieldset class="wide"><legend><code>${field.name}</code><span class="required"> *</span></legend>
      <div class="field"><label for=${`${field.id}-source`}>${t("new.source")}</label>
        <select id=${`${field.id}-source`} @change=${(/** @type {any} */ e) => field.set(sourceOf(e.target.value, isStudent))}>
          ${choices.map((each) => html`<option value=${each} ?selected=${source === each}>${t(`source.${each}`)}</option>`)}
        </select></div>
      <div class="fields">${schemaForm(this.schemas.ModelSource, value, {
        schemas: this.schemas, prefix: field.id, errorOf: (path) => this.errorOf(`${field.path}.${path}`),
        onChange: (next) => field.set(next),
        widgets: {
          ...Object.fromEntries(SOURCES.filter((each) => each !== source).map((each) => [each, () => nothing])),
          ...(source === "path" ? { path: (/** @type {any} */ f) => this.choiceView({ ...f, path: `${field.path}.path` }, paths) } : {}),
          ...(source === "model_id" ? { model_id: (/** @type {any} */ f) => this.choiceView({ ...f, path: `${field.path}.model_id` }, models) } : {}),
        } })}</div></fieldset>`;
  }

  /** @param {import("../schema_form.js").Field} field the teacher of a distillation */
  teacherView(field) {
    const teachers = this.models.filter((each) => each.kind === "teacher");
    const value = field.value || {};
    return html`<fieldset class="wide"><legend><code>teacher</code><span class="required"> *</span></legend>
      <div class="fields">${schemaForm(this.schemas.TeacherSource, value, {
        schemas: this.schemas, prefix: field.id, errorOf: (path) => this.errorOf(`teacher.${path}`),
        onChange: (next) => field.set(next),
        widgets: { model_id: (/** @type {any} */ f) => this.choiceView({ ...f, path: "teacher.model_id" },
          teachers.map((each) => [each.id, each.name || each.id])) } })}</div></fieldset>`;
  }

  planView() {
    const plans = this.plan && this.plan.teacher && this.plan.distill && !this.plan.verdict
      ? [["teacher", this.plan.teacher], ["distill", this.plan.distill]] : this.plan ? [["", this.plan]] : [];
    return html`<section class="panel plan" aria-labelledby="plan-title" aria-busy=${this.isPlanning ? "true" : "false"}>
      <h2 id="plan-title">${t("plan.title")}</h2>
      <div aria-live="polite">${this.planProblem ? problemView(this.planProblem) : nothing}
        ${!plans.length && !this.planProblem ? html`<p>${t("plan.none")}</p>` : nothing}
        ${plans.map(([part, plan]) => this.onePlan(String(part), plan))}</div></section>`;
  }

  /** @param {string} part of a chain, or "" @param {any} plan */
  onePlan(part, plan) {
    const phases = Object.entries(plan.phases);
    const most = Math.max(plan.budget_bytes, ...phases.map(([, size]) => size));
    return html`${part ? html`<h3>${t(`kind.${part}`)}</h3>` : nothing}
      <p class="lead">${verdictView(plan.verdict)} ${bytes(plan.peak_bytes)} / ${bytes(plan.budget_bytes)}
        <span class="small">${known(`plan_phase.${plan.peak_phase}`) || plan.peak_phase} · ${plan.model} · ${plan.ranks} × ${plan.device}</span></p>
      ${stackedBar({ parts: partsOf(plan.components), budget: plan.budget_bytes, title: t("plan.components") })}
      <div class="bars" role="group" aria-label=${t("plan.phases")}>${phases.map(([phase, size]) => html`
        <span class="label">${known(`plan_phase.${phase}`) || phase}</span>
        <svg aria-hidden="true"><rect class="fill-0" height="100%" width="${(100 * size) / most}%"></rect></svg>
        <span class="value">${bytes(size)}</span>`)}</div>
      <p class="small">${t("plan.host")} ${bytes(plan.host_peak_bytes)} ${verdictView(plan.host_verdict)}</p>
      ${plan.alternatives.length ? html`<details ?open=${plan.verdict === "does_not_fit"}>
        <summary>${t("plan.alternatives")} (${plan.alternatives.length})</summary><ul class="remedies">${plan.alternatives.map(
          (/** @type {any} */ each) => html`<li><button type="button" class="alternative"
            @click=${() => this.apply(part, each.changes)}>${each.change}</button>
            <span class="small">${bytes(each.peak_bytes)} ${verdictView(each.verdict)} ${each.lossless ? t("plan.lossless") : ""} ${each.costs}</span></li>`)}
        </ul></details>` : nothing}`;
  }

  /** Fill an alternative into the form. @param {string} part @param {Record<string, any>} changes */
  apply(part, changes) {
    const owner = part ? this.spec[part] : this.spec;
    const { teacher_placement: placement, ...recipe } = changes;
    const known = this.schemas.Recipe.properties;
    const own = Object.fromEntries(Object.entries(recipe).filter(([name]) => name in known));
    const next = { ...owner, recipe: { ...(typeof owner.recipe === "object" ? owner.recipe : {}), ...own } };
    if (placement) next.distillation = { ...owner.distillation, teacher_placement: placement };
    this.set(part ? { ...this.spec, [part]: next } : next);
  }

  jsonView() {
    return html`<section class="panel"><h2><label for="spec-json">JSON</label></h2>
      <textarea id="spec-json" rows="14" spellcheck="false" .value=${this.text} aria-invalid=${this.textError ? "true" : "false"}
        @input=${(/** @type {any} */ e) => this.setText(e.target.value)}></textarea>
      ${this.textError ? html`<p class="error" role="alert">${this.textError}</p>` : nothing}</section>`;
  }
}

/** @param {string} source @param {boolean} isStudent @returns {any} */
function sourceOf(source, isStudent) {
  if (source === "config") return { config: { model_type: "qwen3" }, tokenizer: isStudent ? "teacher" : { train: true } };
  if (source === "layers_of_teacher") return { layers_of_teacher: 2, tokenizer: "teacher" };
  return { [source]: "" };
}

/** @param {any} spec @param {string} kind @returns {any} the same wishes in a spec of another kind */
function converted(spec, kind) {
  const { kind: former, ...rest } = spec;
  const base = former === "chain" ? rest.teacher || {} : rest;
  const model = base.model || base.student;
  const { model: _m, student: _s, teacher: _t, distillation, gate, promote, ...shared } = base;
  if (kind === "chain") return { kind, teacher: { ...shared, ...(model ? { model } : {}) }, distill: {} };
  if (kind === "distill") return { kind, ...shared, ...(model ? { student: model } : {}) };
  return { kind, ...shared, ...(model ? { model } : {}) };
}

/** @param {any} value @returns {any} without what is null */
function withoutDefaults(value) {
  if (typeof value !== "object" || value === null || Array.isArray(value)) return value;
  return Object.fromEntries(Object.entries(value).filter(([, each]) => each !== null)
    .map(([name, each]) => [name, withoutDefaults(each)]));
}

function readDraft() {
  try {
    const found = JSON.parse(localStorage.getItem(DRAFT) || "null");
    return found && typeof found === "object" ? found : { kind: "teacher" };
  } catch {
    return { kind: "teacher" };
  }
}
