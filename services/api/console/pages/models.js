// @ts-check
// Models: a student beside its teacher, head by head; who serves, and since when.
import { html, svg, nothing } from "../lit.js";
import { t } from "../messages.js";
import { request, url, curl } from "../api.js";
import { bytes, moment, number, percent } from "../format.js";
import { Actions, actionView, curlView, problemView } from "../parts.js";
import { shortId } from "./jobs.js";

const PAGE = 50;

/** @param {import("../main.js").Context} context @returns {import("../main.js").Page} */
export function create(context) {
  return context.path ? new ModelPage(context) : new ModelsPage(context);
}

class ModelsPage {
  /** @param {import("../main.js").Context} context */
  constructor(context) {
    this.context = context;
    /** @type {any[]} */
    this.models = [];
    /** @type {any[]} */
    this.promotions = [];
    this.next = null;
    this.problem = /** @type {any} */ (null);
    this.isLoading = true;
    this.actions = new Actions();
    this.timer = 0;
    this.load();
  }

  stop() {
    clearTimeout(this.timer);
    this.timer = -1;
  }

  /** @param {any} [cursor] */
  async load(cursor = null) {
    try {
      const [models, promotions] = await Promise.all([
        request("GET", url("/models", { limit: PAGE, cursor })), request("GET", "/promotions?limit=50"),
      ]);
      this.models = cursor ? [...this.models, ...models.items] : models.items;
      this.next = models.next_cursor;
      this.promotions = promotions.items;
      this.problem = null;
    } catch (error) {
      this.problem = error;
    }
    this.isLoading = false;
    this.context.update();
    if (this.timer !== -1 && !cursor) this.timer = setTimeout(() => this.refresh(), 3000);
  }

  async refresh() {
    try {
      this.promotions = (await request("GET", "/promotions?limit=50")).items;
    } catch {
      // the offline notice says why
    }
    this.context.update();
    if (this.timer !== -1) this.timer = setTimeout(() => this.refresh(), 3000);
  }

  render() {
    return html`<h1>${t("nav.models")}</h1>${problemView(this.problem)}
      ${this.isLoading ? html`<p aria-busy="true">${t("loading")}</p>` : nothing}
      ${this.models.length ? html`<div class="scroll" tabindex="0" role="region" aria-label=${t("nav.models")}><table>
        <thead><tr><th scope="col">${t("models.name")}</th><th scope="col">${t("models.quality")}</th>
          <th scope="col">${t("models.gate")}</th><th scope="col">${t("models.size")}</th><th scope="col">${t("models.serves")}</th>
          <th scope="col">${t("jobs.created")}</th></tr></thead>
        <tbody>${this.models.map((model) => html`<tr data-model=${model.id}>
          <th scope="row"><a href="#/models/${model.id}">${model.name || shortId(model.id)}</a>
            <span class="small">${t(`kind.${model.kind}`)}${model.teacher_model_id ? html` · ${t("job.teacher")}
              <a href="#/models/${model.teacher_model_id}">${shortId(model.teacher_model_id)}</a>` : nothing}</span></th>
          <td>${Object.entries(model.metrics.heads || {}).map(([head, found]) => html`<div>${head}
            ${number(/** @type {any} */ (found).macro_f1)}</div>`)}</td>
          <td>${gateView(model.gate)}</td><td>${bytes(model.size_bytes)}</td>
          <td>${servedAliases(model, this.promotions)}</td><td>${moment(model.created_at)}</td></tr>`)}</tbody></table></div>`
        : this.isLoading ? nothing : html`<p>${t("models.none")}</p>`}
      ${this.next ? html`<button type="button" @click=${() => this.load(this.next)}>${t("more")}</button>` : nothing}
      ${curlView(curl("GET", url("/models", { limit: PAGE })))}
      ${this.actions.render()}
      ${historyView(this.promotions, this.context, this.actions, () => this.refresh())}`;
  }
}

/** @param {any} model @param {any[]} promotions the newest first */
function servedAliases(model, promotions) {
  const current = currentOf(promotions).filter((each) => each.model_id === model.id);
  return current.length ? current.map((each) => html`<span class="tag passed">${each.alias}</span> `) : "–";
}

/** @param {any[]} promotions @returns {any[]} the newest of each alias */
function currentOf(promotions) {
  const seen = new Set();
  return promotions.filter((each) => {
    const key = `${each.project}/${each.alias}`;
    return seen.has(key) ? false : seen.add(key);
  });
}

/** @param {any} gate */
function gateView(gate) {
  if (!gate) return "–";
  return html`<span class="tag ${gate.passed ? "passed" : "refused"}">${t(gate.passed ? "gate.passed" : "gate.refused")}</span>`;
}

/**
 * @param {any[]} promotions @param {import("../main.js").Context} context @param {Actions} actions
 * @param {() => any} reload
 */
function historyView(promotions, context, actions, reload) {
  if (!promotions.length) return nothing;
  const current = new Set(currentOf(promotions).map((each) => each.id));
  return html`<section class="panel" aria-labelledby="history-title"><h2 id="history-title">${t("models.history")}</h2>
    <div class="scroll" tabindex="0" role="region" aria-label=${t("models.history")}><table>
    <thead><tr><th scope="col">${t("models.alias")}</th><th scope="col">${t("models.name")}</th><th scope="col">${t("models.since")}</th>
      <th scope="col">${t("models.by")}</th><th scope="col">${t("models.processes")}</th><th scope="col">${t("models.action")}</th></tr></thead>
    <tbody>${promotions.map((each) => html`<tr data-promotion=${each.id}><th scope="row">${each.alias}</th>
      <td><a href="#/models/${each.model_id}">${shortId(each.model_id)}</a>
        ${current.has(each.id) ? html`<span class="tag">${t("models.current")}</span>` : nothing}
        ${each.forced ? html`<span class="small">${t("models.forced", { reason: each.reason || "" })}</span>` : nothing}</td>
      <td>${moment(each.created_at)}</td><td>${each.promoted_by || "–"}</td>
      <td>${servingView(each.serving)}</td>
      <td>${!current.has(each.id) && context.can("promote") ? actionView({
        label: t("models.roll_back"), command: curl("POST", `/models/${each.model_id}/promote`, rollBackBody(each)),
        run: async () => {
          await request("POST", `/models/${each.model_id}/promote`, { json: rollBackBody(each) });
          await reload();
        } }, actions) : nothing}</td></tr>`)}</tbody></table></div>
    ${curlView(curl("GET", "/promotions?limit=50"))}</section>`;
}

/** What was forced once is forced again for the same reason. @param {any} promotion */
function rollBackBody(promotion) {
  return { alias: promotion.alias, ...(promotion.forced ? { force: true, reason: promotion.reason } : {}) };
}

/** @param {any} serving */
function servingView(serving) {
  if (!serving) return t("serving.none");
  const shown = serving.processes.length ? serving.processes : [{ process: "", ...serving }];
  return html`${shown.map((/** @type {any} */ each) => html`<div>${t(`serving.${each.outcome}`)} <span class="small">${each.process}
    ${each.engine || ""} ${each.why || ""}</span></div>`)}`;
}

class ModelPage {
  /** @param {import("../main.js").Context} context */
  constructor(context) {
    this.context = context;
    /** @type {any} */
    this.model = null;
    /** @type {any} */
    this.files = null;
    this.problem = /** @type {any} */ (null);
    this.actions = new Actions();
    this.alias = "default";
    this.reason = "";
    this.mustForce = false;
    this.load();
  }

  async load() {
    try {
      this.model = await request("GET", `/models/${this.context.path}`);
      this.problem = null;
    } catch (error) {
      this.problem = error;
    }
    this.context.update();
  }

  body() {
    const isForced = this.mustForce && this.reason;
    return { alias: this.alias, ...(isForced ? { force: true, reason: this.reason } : {}) };
  }

  async promote() {
    try {
      await request("POST", `/models/${this.model.id}/promote`, { json: this.body() });
      this.mustForce = false;
      location.hash = "#/models";
    } catch (error) {
      if (/** @type {any} */ (error).type === "gate-not-passed") this.mustForce = true;
      throw error;
    }
  }

  render() {
    const { model } = this;
    if (!model) return html`<h1>${t("nav.models")}</h1>${this.problem ? problemView(this.problem) : html`<p aria-busy="true">${t("loading")}</p>`}`;
    return html`<h1>${model.name || shortId(model.id)}</h1>
      <p class="small">${t(`kind.${model.kind}`)} · <code>${model.id}</code> · <a href="#/job/${model.job_id}">${t("job.title")}</a>
        · <a href="#/datasets/${model.dataset_id}">${t("job.dataset")}</a>
        ${model.teacher_model_id ? html` · <a href="#/models/${model.teacher_model_id}">${t("job.teacher")}</a>` : nothing}</p>
      ${this.sizes()}
      ${this.gates()}
      ${this.promotion()}
      ${Object.entries(model.metrics.heads || {}).map(([name, found]) => this.head(name, found))}
      ${curlView(curl("GET", `/models/${model.id}`))}`;
  }

  sizes() {
    const { model } = this;
    const teacher = model.metrics.teacher || null;
    const latency = (/** @type {any} */ side) => side && (side.single_text_seconds ?? side.latency_seconds ?? side.milliseconds_per_text);
    const rows = [
      [t("models.parameters"), number(model.parameters), teacher && number(teacher.parameters)],
      [t("models.size"), bytes(model.size_bytes), teacher && bytes(teacher.size_bytes)],
      [t("models.latency"), milliseconds(latency(model.metrics)), teacher && milliseconds(latency(teacher))],
      ["macro-F1", number(model.metrics.macro_f1), teacher && number(meanF1(teacher))],
    ];
    return html`<section class="panel" aria-labelledby="sides-title"><h2 id="sides-title">${t("models.sides")}</h2><table>
      <thead><tr><td></td><th scope="col">${t(`kind.${model.kind}`)}</th>${teacher ? html`<th scope="col">${t("kind.teacher")}</th>` : nothing}</tr></thead>
      <tbody>${rows.map(([name, own, other]) => html`<tr><th scope="row">${name}</th><td>${own}</td>
        ${teacher ? html`<td>${other}</td>` : nothing}</tr>`)}</tbody></table></section>`;
  }

  gates() {
    const { gate, int8_gate: int8 } = this.model;
    if (!gate && !int8) return nothing;
    return html`<section class="panel" aria-labelledby="gate-title"><h2 id="gate-title">${t("models.gate")} ${gateView(gate)}</h2>
      ${gate ? html`<p>${gate.message}</p>` : nothing}
      ${int8 ? html`<h3>${t("models.int8")} ${gateView(int8)}</h3><table><thead><tr><th scope="col">${t("models.head")}</th>
        <th scope="col">${t("models.agreement")}</th><th scope="col">macro-F1 int8</th><th scope="col">macro-F1 float32</th></tr></thead>
        <tbody>${Object.entries(int8.heads).map(([name, found]) => html`<tr><th scope="row">${name}</th>
          <td>${percent(/** @type {any} */ (found).agreement)}</td><td>${number(/** @type {any} */ (found).macro_f1)}</td>
          <td>${number(/** @type {any} */ (found).macro_f1_float32)}</td></tr>`)}</tbody></table>` : nothing}</section>`;
  }

  promotion() {
    if (!this.context.can("promote")) return nothing;
    return html`<section class="panel" aria-labelledby="promote-title"><h2 id="promote-title">${t("models.promote")}</h2>
      <form class="fields" @submit=${(/** @type {Event} */ e) => e.preventDefault()}>
        <div class="field"><label for="alias">${t("models.alias")}</label><input id="alias" .value=${this.alias}
          pattern="[a-z][a-z0-9_\\-]*" @input=${(/** @type {any} */ e) => { this.alias = e.target.value; this.context.update(); }}></div>
        ${this.mustForce ? html`<div class="field"><label for="reason">${t("models.reason")}</label><input id="reason" maxlength="1000"
          .value=${this.reason} @input=${(/** @type {any} */ e) => { this.reason = e.target.value; this.context.update(); }}></div>` : nothing}
      </form>
      ${this.actions.render()}
      ${actionView({ label: this.mustForce ? t("models.force") : t("models.promote"), kind: this.mustForce ? "danger" : "primary",
        run: () => this.promote(), disabled: this.mustForce && !this.reason,
        command: curl("POST", `/models/${this.model.id}/promote`, this.body()) }, this.actions)}</section>`;
  }

  /** @param {string} name @param {any} found */
  head(name, found) {
    const teacher = this.model.metrics.teacher && this.model.metrics.teacher.heads && this.model.metrics.teacher.heads[name];
    const head = this.model.heads.find((/** @type {any} */ each) => each.name === name);
    const rows = [
      ["accuracy", percent], ["macro_f1", number], ["ece", number], ["ece_calibrated", number], ["temperature", number],
      ["agreement", percent],
    ].filter(([field]) => found[/** @type {string} */ (field)] !== undefined);
    return html`<section class="panel"><h2>${name} <span class="small">${t("models.texts", { texts: number(found.texts) })}</span></h2>
      <div class="sides"><div><table><thead><tr><td></td><th scope="col">${t(`kind.${this.model.kind}`)}</th>
        ${teacher ? html`<th scope="col">${t("kind.teacher")}</th>` : nothing}</tr></thead>
        <tbody>${rows.map(([field, format]) => html`<tr><th scope="row">${t(`metric.${field}`)}</th>
          <td>${/** @type {any} */ (format)(found[/** @type {string} */ (field)])}</td>
          ${teacher ? html`<td>${/** @type {any} */ (format)(teacher[/** @type {string} */ (field)])}</td>` : nothing}</tr>`)}</tbody></table></div>
      ${found.reliability ? html`<div><h3>${t("models.calibration")}</h3>${reliabilityView(found, teacher)}</div>` : nothing}</div>
      <div class="sides">${confusionView(head, found, t(`kind.${this.model.kind}`))}
        ${teacher ? confusionView(head, teacher, t("kind.teacher")) : nothing}</div></section>`;
  }
}

/** @param {any} side */
function meanF1(side) {
  const found = Object.values(side.heads || {}).map((each) => /** @type {any} */ (each).macro_f1);
  return found.length ? found.reduce((a, b) => a + b, 0) / found.length : null;
}

/** @param {number | null | undefined} seconds */
function milliseconds(seconds) {
  return seconds === null || seconds === undefined ? "–" : `${number(seconds * 1000, 2)} ms`;
}

/** Confidence against accuracy, 0 to 1. @param {any} student @param {any} teacher */
function reliabilityView(student, teacher) {
  const line = (/** @type {any[]} */ bins) => bins.map((bin) => `${100 * bin.confidence},${100 - 100 * bin.accuracy}`).join(" ");
  return html`<svg class="curve-plot" viewBox="0 0 100 100" role="img" aria-label=${t("models.calibration.label")}>
      <line class="ideal" x1="0" y1="100" x2="100" y2="0"></line>
      ${svg`<polyline class="student" points="${line(student.reliability)}"></polyline>`}
      ${teacher && teacher.reliability ? svg`<polyline class="teacher" points="${line(teacher.reliability)}"></polyline>` : nothing}
    </svg>
    <details><summary>${t("models.bins")}</summary><table><thead><tr><th scope="col">${t("models.confidence")}</th>
      <th scope="col">${t("metric.accuracy")}</th><th scope="col">${t("models.num_predictions")}</th></tr></thead>
      <tbody>${student.reliability.map((/** @type {any} */ bin) => html`<tr><th scope="row">${percent(bin.confidence)}</th>
        <td>${percent(bin.accuracy)}</td><td>${number(bin.predictions)}</td></tr>`)}</tbody></table></details>`;
}

/** @param {any} head @param {any} found @param {string} side */
function confusionView(head, found, side) {
  const labels = head ? head.labels : [];
  if (!found.confusion || !found.confusion.length) {
    if (!found.top_confusions) return nothing;
    return html`<div><h3>${t("models.top_confusions")} · ${side}</h3><ul>${found.top_confusions.slice(0, 20).map(
      (/** @type {any} */ each) => html`<li>${each.true} → ${each.predicted}: ${number(each.texts)}</li>`)}</ul></div>`;
  }
  const isMulti = head && head.type === "multi_label";
  const columns = isMulti ? [t("confusion.tp"), t("confusion.fp"), t("confusion.fn"), t("confusion.tn")] : labels;
  return html`<div><h3>${t("models.confusion")} · ${side}</h3>
    <div class="scroll" tabindex="0" role="region" aria-label=${`${t("models.confusion")} ${side}`}><table class="confusion">
    <thead><tr><td>${isMulti ? "" : t("confusion.rows")}</td>${columns.map((/** @type {string} */ each) => html`<th scope="col">${each}</th>`)}</tr></thead>
    <tbody>${found.confusion.map((/** @type {number[]} */ row, /** @type {number} */ index) => html`<tr><th scope="row">${labels[index]}</th>
      ${row.map((value, column) => html`<td class=${!isMulti && column === index ? "diagonal" : ""}>${number(value)}</td>`)}</tr>`)}</tbody>
    </table></div></div>`;
}
