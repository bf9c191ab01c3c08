// @ts-check
// Datasets: upload with its progress, faults by line; what is in a stored one.
import { html, nothing } from "../lit.js";
import { t } from "../messages.js";
import { request, upload, url, curl, Problem } from "../api.js";
import { moment, number, percent } from "../format.js";
import { Actions, actionView, curlView, problemView } from "../parts.js";
import { loadSchemas, schemaForm } from "../schema_form.js";

const PAGE = 50;
const SPLITS = ["train", "validation", "test"];
const JSON_FIELDS = ["heads", "fractions", "label_names", "missing_labels"];

/** @param {import("../main.js").Context} context @returns {import("../main.js").Page} */
export function create(context) {
  return context.path ? new DatasetPage(context) : new DatasetsPage(context);
}

class DatasetsPage {
  /** @param {import("../main.js").Context} context */
  constructor(context) {
    this.context = context;
    /** @type {any[]} */
    this.datasets = [];
    this.next = /** @type {string | null} */ (null);
    this.isLoading = true;
    this.problem = /** @type {any} */ (null);
    this.uploader = context.can("submit") ? new Uploader(context) : null;
    this.load();
  }

  stop() {
    if (this.uploader) this.uploader.stop();
  }

  /** @param {string | null} [cursor] */
  async load(cursor = null) {
    try {
      const page = await request("GET", url("/datasets", { limit: PAGE, cursor }));
      this.datasets = cursor ? [...this.datasets, ...page.items] : page.items;
      this.next = page.next_cursor;
      this.problem = null;
    } catch (error) {
      this.problem = error;
    }
    this.isLoading = false;
    this.context.update();
  }

  render() {
    return html`<h1>${t("nav.datasets")}</h1>${problemView(this.problem)}
      ${this.uploader ? this.uploader.render() : nothing}
      ${this.isLoading ? html`<p aria-busy="true">${t("loading")}</p>` : nothing}
      ${this.datasets.length ? html`<div class="scroll" tabindex="0" role="region" aria-label=${t("nav.datasets")}><table>
        <thead><tr><th scope="col">${t("datasets.name")}</th><th scope="col">${t("datasets.heads")}</th>
          <th scope="col">${t("datasets.rows")}</th><th scope="col">${t("jobs.owner")}</th><th scope="col">${t("jobs.created")}</th></tr></thead>
        <tbody>${this.datasets.map((each) => html`<tr data-dataset=${each.id}><th scope="row"><a href="#/datasets/${each.id}">${each.name}</a></th>
          <td>${each.heads.map((/** @type {any} */ head) => head.name).join(", ") || t("datasets.unlabelled")}</td>
          <td>${number(SPLITS.reduce((sum, split) => sum + (each.rows[split] || 0), 0))}</td>
          <td>${each.created_by || "–"}</td><td>${moment(each.created_at)}</td></tr>`)}</tbody></table></div>`
        : this.isLoading ? nothing : html`<p>${t("datasets.none")}</p>`}
      ${this.next ? html`<button type="button" @click=${() => this.load(this.next)}>${t("more")}</button>` : nothing}
      ${curlView(curl("GET", url("/datasets", { limit: PAGE })))}`;
  }
}

class Uploader {
  /** @param {import("../main.js").Context} context */
  constructor(context) {
    this.context = context;
    /** @type {File | null} */
    this.file = null;
    /** @type {Record<string, any>} */
    this.fields = {};
    /** @type {any} */
    this.schemas = null;
    this.share = /** @type {number | null} */ (null);
    /** @type {any} */
    this.preview = null;
    this.actions = new Actions();
    /** @type {{abort: () => void} | null} */
    this.current = null;
    loadSchemas().then((schemas) => {
      this.schemas = schemas;
      context.update();
    }, () => {});
  }

  stop() {
    if (this.current) this.current.abort();
  }

  form() {
    const form = new FormData();
    for (const [name, value] of Object.entries(this.fields)) {
      form.append(name, JSON_FIELDS.includes(name) ? JSON.stringify(value) : Array.isArray(value) ? value.join(",") : String(value));
    }
    if (this.file) form.append("file", this.file);
    return form;
  }

  /** @param {string} path @returns {Promise<any>} */
  async send(path) {
    this.share = 0;
    const sending = upload(path, this.form(), (share) => {
      this.share = share;
      this.context.update();
    });
    this.current = sending;
    try {
      return await sending.done;
    } finally {
      this.share = null;
      this.current = null;
    }
  }

  async store() {
    const dataset = await this.send("/datasets");
    location.hash = `#/datasets/${dataset.id}`;
  }

  async look() {
    this.preview = await this.send("/datasets/preview");
    const suggested = (this.preview.suggested || {});
    for (const name of ["text_column", "text_pair_column", "split_column", "heads"]) {
      const found = suggested[name];
      if (this.fields[name] === undefined && found && (!Array.isArray(found) || found.length)) this.fields[name] = found;
    }
  }

  command(/** @type {string} */ path) {
    const parts = Object.entries(this.fields).map(([name, value]) => `${name}=${JSON_FIELDS.includes(name) ? JSON.stringify(value) : value}`);
    return curl("POST", path, undefined, [...parts, `file=@${this.file ? this.file.name : "FILE"}`]);
  }

  render() {
    const { problem } = this.actions;
    return html`<section class="panel" aria-labelledby="upload-title"><h2 id="upload-title">${t("datasets.upload")}</h2>
      <form @submit=${(/** @type {Event} */ e) => e.preventDefault()}>
        <label for="file">${t("datasets.file")}</label>
        <input id="file" type="file" @change=${(/** @type {any} */ e) => {
          this.file = e.target.files[0] || null;
          this.preview = null;
          this.actions.problem = null;
          this.context.update();
        }}>
        ${this.schemas ? html`<details ?open=${Boolean(problem) || Boolean(this.preview)}><summary>${t("datasets.options")}</summary><div class="fields">
          ${schemaForm(this.schemas.DatasetForm, this.fields, { schemas: this.schemas, prefix: "upload",
            errorOf: (path) => (problem instanceof Problem ? problem.of(path) : undefined),
            widgets: { file: () => nothing, ...Object.fromEntries(JSON_FIELDS.map((name) => [name, (/** @type {any} */ f) => this.jsonField(f)])) },
            onChange: (fields) => {
              this.fields = fields;
              this.context.update();
            } })}</div></details>` : nothing}
        ${this.share !== null ? html`<p><progress max="1" value=${this.share} aria-label=${t("datasets.uploading")}></progress>
          ${this.share < 1 ? percent(this.share) : t("datasets.validating")}</p>` : nothing}
        <div class="actions">
          ${actionView({ label: t("datasets.preview"), run: () => this.look(), disabled: !this.file, command: this.command("/datasets/preview") }, this.actions)}
          ${actionView({ label: t("datasets.store"), kind: "primary", run: () => this.store(), disabled: !this.file, command: this.command("/datasets") }, this.actions)}
        </div>
      </form>
      ${this.actions.render()}
      ${problem instanceof Problem && problem.document.faults ? faultsView(problem.document) : nothing}
      ${this.preview ? previewView(this.preview) : nothing}</section>`;
  }

  /** @param {any} field */
  jsonField(field) {
    return html`<div class="field"><label for=${field.id}><code>${field.name}</code></label>
      <textarea id=${field.id} rows="2" spellcheck="false" .value=${field.value === undefined ? "" : JSON.stringify(field.value)}
        aria-describedby=${`${field.id}-hint`} @change=${(/** @type {any} */ e) => {
          try {
            field.set(e.target.value.trim() ? JSON.parse(e.target.value) : undefined);
          } catch {
            e.target.setCustomValidity(t("form.not_json"));
            e.target.reportValidity();
          }
        }}></textarea><span class="small" id=${`${field.id}-hint`}>${field.schema.description || ""}</span></div>`;
  }
}

/** @param {any} document of a refused upload */
function faultsView(document) {
  return html`<div class="faults"><h3>${t("datasets.faults", { total: number(document.total_faults) })}</h3>
    <table><thead><tr><th scope="col">${t("datasets.line")}</th><th scope="col">${t("datasets.field")}</th><th scope="col">${t("job.message")}</th></tr></thead>
    <tbody>${document.faults.map((/** @type {any} */ fault) => html`<tr><th scope="row">${fault.line ?? "–"}</th><td>${fault.field || "–"}</td>
      <td>${fault.message}</td></tr>`)}</tbody></table>
    ${document.found ? html`<p>${t("datasets.found")} ${document.found}</p><pre tabindex="0">${document.command}</pre>` : nothing}</div>`;
}

/** @param {any} preview */
function previewView(preview) {
  return html`<details open><summary>${t("datasets.preview.title")}</summary>
    <pre tabindex="0">${JSON.stringify(preview, null, 2)}</pre></details>`;
}

class DatasetPage {
  /** @param {import("../main.js").Context} context */
  constructor(context) {
    this.context = context;
    /** @type {any} */
    this.dataset = null;
    /** @type {any} */
    this.statistics = null;
    this.problem = /** @type {any} */ (null);
    this.actions = new Actions();
    this.load();
  }

  async load() {
    const path = `/datasets/${this.context.path}`;
    try {
      this.dataset = await request("GET", path);
      this.context.update();
      this.statistics = await request("GET", `${path}/statistics`);
    } catch (error) {
      this.problem = error;
    }
    this.context.update();
  }

  render() {
    const { dataset, statistics } = this;
    if (!dataset) return html`<h1>${t("nav.datasets")}</h1>${this.problem ? problemView(this.problem) : html`<p aria-busy="true">${t("loading")}</p>`}`;
    return html`<h1>${dataset.name}</h1>
      <p class="small"><code>${dataset.id}</code> · ${moment(dataset.created_at)} · ${dataset.created_by || ""}</p>
      ${this.context.can("submit") ? html`<div class="actions"><a class="button" href="#/new?dataset=${dataset.id}">${t("datasets.train")}</a>
        ${actionView({ label: t("datasets.delete"), kind: "danger", command: curl("DELETE", `/datasets/${dataset.id}`),
          run: async () => {
            await request("DELETE", `/datasets/${dataset.id}`);
            location.hash = "#/datasets";
          } }, this.actions)}</div>` : nothing}
      ${this.actions.render()}
      <div class="panel"><dl class="facts">${SPLITS.map((split) => html`<div><dt>${t(`split.${split}`)}</dt><dd>${number(dataset.rows[split] || 0)}</dd></div>`)}</dl>
        ${dataset.warnings.length ? html`<ul>${dataset.warnings.map((/** @type {string} */ each) => html`<li>${each}</li>`)}</ul>` : nothing}</div>
      ${problemView(this.problem)}
      ${statistics ? html`${dataset.heads.map((/** @type {any} */ head) => balanceView(head, statistics))}
        ${lengthsView(statistics)}${samplesView(dataset, statistics)}` : nothing}
      ${curlView(curl("GET", `/datasets/${dataset.id}/statistics`))}`;
  }
}

/** @param {any} head @param {any} statistics */
function balanceView(head, statistics) {
  const splits = SPLITS.filter((split) => statistics.splits[split]);
  const totals = /** @type {Record<string, number>} */ ({});
  for (const split of splits) {
    for (const [label, texts] of Object.entries(statistics.splits[split].labels[head.name])) totals[label] = (totals[label] || 0) + Number(texts);
  }
  const labels = Object.keys(totals).sort((a, b) => totals[b] - totals[a]).slice(0, 50);
  const most = Math.max(1, ...Object.values(totals));
  return html`<section class="panel"><h2>${head.name} <span class="small">${t(`head.${head.type}`)}, ${t("datasets.labels", { labels: number(head.labels.length) })}</span></h2>
    <div class="scroll" tabindex="0" role="region" aria-label=${head.name}><table><thead><tr><th scope="col">${t("datasets.label")}</th><th scope="col"></th>
      ${splits.map((split) => html`<th scope="col">${t(`split.${split}`)}</th>`)}</tr></thead>
      <tbody>${labels.map((label) => html`<tr><th scope="row">${label}</th><td><svg class="balance" width="120" height="12" aria-hidden="true">
        <rect class="fill-0" height="12" width=${(120 * totals[label]) / most}></rect></svg></td>
        ${splits.map((split) => html`<td>${number(statistics.splits[split].labels[head.name][label] || 0)}</td>`)}</tr>`)}
      <tr><th scope="row">${t("datasets.missing")}</th><td></td>${splits.map((split) => html`<td>${number(statistics.splits[split].missing_labels[head.name])}</td>`)}</tr>
      </tbody></table></div></section>`;
}

/** @param {any} statistics */
function lengthsView(statistics) {
  const most = Math.max(1, ...statistics.lengths.map((/** @type {any} */ bin) => bin.texts));
  return html`<section class="panel"><h2>${t("datasets.lengths")}</h2>
    <p class="small">${t("datasets.lengths.facts", { mean: number(statistics.mean_characters, 1), longest: number(statistics.longest_characters) })}</p>
    <div class="bars lengths" role="group" aria-label=${t("datasets.lengths")}>${statistics.lengths.map((/** @type {any} */ bin) => html`
      <span class="label">${number(bin.from_characters)}–${number(Math.max(bin.from_characters, bin.to_characters - 1))}</span>
      <svg aria-hidden="true"><rect class="fill-3" height="100%" width="${(100 * bin.texts) / most}%"></rect></svg>
      <span class="value">${number(bin.texts)}</span>`)}</div></section>`;
}

/** @param {any} dataset @param {any} statistics */
function samplesView(dataset, statistics) {
  return html`<section class="panel"><h2>${t("datasets.samples")}</h2>${SPLITS.filter((split) => statistics.splits[split]).map((split) => html`
    <details ?open=${split === "train"}><summary>${t(`split.${split}`)}</summary>
    <div class="scroll" tabindex="0" role="region" aria-label=${`${t("datasets.samples")} ${t(`split.${split}`)}`}><table class="samples">
      <thead><tr><th scope="col">${t("datasets.line")}</th><th scope="col">${t("datasets.text")}</th>
      ${dataset.heads.map((/** @type {any} */ head) => html`<th scope="col">${head.name}</th>`)}</tr></thead>
      <tbody>${statistics.splits[split].samples.map((/** @type {any} */ row) => html`<tr><th scope="row">${row.line}</th>
        <td>${row.text}${row.text_pair !== null ? html`<hr>${row.text_pair}` : nothing}</td>
        ${dataset.heads.map((/** @type {any} */ head) => html`<td>${row.labels[head.name] ? row.labels[head.name].join(", ") : "–"}</td>`)}</tr>`)}</tbody>
    </table></div></details>`)}</section>`;
}
