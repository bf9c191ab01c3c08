// @ts-check
// One job: its state, its curves, its memory against the plan, its log; what killed it, and how to go on.
import { html, nothing } from "../lit.js";
import { t, known } from "../messages.js";
import { request, url, Stream, curl, Problem } from "../api.js";
import { bytes, duration, moment, number, percent, secondsBetween } from "../format.js";
import { Actions, actionView, curlView, idempotencyKey, partsOf, problemView, progressView, stackedBar, stateView,
  verdictView } from "../parts.js";
import { Chart } from "../chart.js";
import { diagnosisView } from "../diagnosis.js";
import { loadSchemas, schemaForm } from "../schema_form.js";
import { shortId } from "./jobs.js";

const POINTS = 400;
const LOG_BYTES = 16384;
const REFRESH_MILLISECONDS = 2500;
const TERMINAL = ["succeeded", "failed", "cancelled"];
const COLOURS = ["--series-1", "--series-2", "--series-3", "--series-4", "--series-5", "--series-6", "--series-7", "--series-8"];

/** @param {import("../main.js").Context} context @returns {import("../main.js").Page} */
export function create(context) {
  return new JobPage(context);
}

class JobPage {
  /** @param {import("../main.js").Context} context */
  constructor(context) {
    this.context = context;
    this.id = context.path;
    this.attempt = context.query.get("attempt");
    /** @type {any} */
    this.job = null;
    /** @type {any} */
    this.metrics = null;
    /** @type {any} */
    this.memory = null;
    this.log = "";
    /** @type {any} */
    this.problem = null;
    this.actions = new Actions();
    this.retryKey = idempotencyKey();
    /** @type {any} */
    this.retryBody = readDraft(this.id);
    /** @type {any} */
    this.schemas = null;
    /** @type {Map<string, Chart>} */
    this.charts = new Map();
    /** @type {Stream | null} */
    this.stream = null;
    this.timer = 0;
    this.isStopped = false;
    this.load();
  }

  stop() {
    this.isStopped = true;
    clearTimeout(this.timer);
    if (this.stream) this.stream.close();
    for (const chart of this.charts.values()) chart.stop();
  }

  /** @param {URLSearchParams} query */
  change(query) {
    const attempt = query.get("attempt");
    if (attempt !== this.attempt) {
      this.attempt = attempt;
      this.loadOutput();
    }
  }

  async load() {
    try {
      this.job = await request("GET", `/jobs/${this.id}`);
      this.problem = null;
    } catch (error) {
      this.problem = error;
      if (error instanceof Problem && (error.status === 0 || error.status >= 500)) this.later(() => this.load());
      this.context.update();
      return;
    }
    if (this.isStopped) return;
    this.context.update();
    await this.loadOutput();
    if (this.isStopped || this.isOver()) return;
    if (!this.stream) this.stream = new Stream(`/jobs/${this.id}/events`, (type, data) => this.onEvent(type, data));
    this.later(() => this.refresh());
  }

  /** @param {() => void} action */
  later(action) {
    clearTimeout(this.timer);
    this.timer = setTimeout(action, REFRESH_MILLISECONDS);
  }

  isOver() {
    return this.job && TERMINAL.includes(this.job.state);
  }

  /** @param {string} type @param {any} data */
  onEvent(type, data) {
    if (type === "progress") {
      this.job = { ...this.job, progress: data.progress, phase: data.phase };
      this.context.update();
    } else if (type === "state" || type === "phase") {
      const found = data.data;
      this.job = { ...this.job, ...(found.state ? { state: found.state } : {}), ...(found.phase ? { phase: found.phase } : {}) };
      this.context.update();
      if (type === "state") this.reload();
    }
  }

  async reload() {
    try {
      this.job = await request("GET", `/jobs/${this.id}`);
      await this.loadOutput();
      if (this.isOver() && this.stream) this.stream.close();
    } catch {
      // The stream and the next refresh try again.
    }
    this.context.update();
  }

  /** What no event tells: curves, memory, log. Only while somebody looks. */
  async refresh() {
    if (this.isStopped || this.isOver()) return;
    if (!document.hidden && this.job.state !== "waiting" && this.job.state !== "queued") await this.loadOutput();
    if (!this.isStopped && !this.isOver()) this.later(() => this.refresh());
  }

  async loadOutput() {
    const query = { attempt: this.attempt, points: POINTS };
    const path = `/jobs/${this.id}`;
    try {
      [this.metrics, this.memory, this.log] = await Promise.all([
        request("GET", url(`${path}/metrics`, query)),
        request("GET", url(`${path}/memory`, query)),
        request("GET", url(`${path}/logs`, { attempt: this.attempt, tail_bytes: LOG_BYTES })),
      ]);
    } catch {
      return;  // the offline notice, or the job's own problem, says why
    }
    if (this.isStopped) return;
    this.showCurves();
    this.showMemory();
    this.context.update();
  }

  /** @param {string} name @param {() => Chart} make */
  chart(name, make) {
    let found = this.charts.get(name);
    if (!found) this.charts.set(name, (found = make()));
    return found;
  }

  showCurves() {
    const points = this.metrics.series.points.filter((/** @type {any} */ p) => p.step !== null && p.step !== undefined);
    const steps = points.map((/** @type {any} */ p) => p.step);
    const curves = [
      ["loss", "curve.loss", "--series-1", number],
      ["learning_rate", "curve.learning_rate", "--series-2", (/** @type {number} */ v) => v.toExponential(1)],
      ["tokens_per_second", "curve.tokens_per_second", "--series-3", number],
      ["padding_share", "curve.padding_share", "--series-4", percent],
    ];
    for (const [field, key, colour, format] of /** @type {any[]} */ (curves)) {
      const values = points.map((/** @type {any} */ p) => p[field] ?? null);
      if (!values.some((/** @type {any} */ v) => v !== null)) continue;
      this.chart(field, () => new Chart({ label: t(key), xLabel: t("curve.step"), format,
        series: [{ label: t(key), colour }] })).show([steps, values]);
    }
    const evaluations = this.metrics.evaluations.filter((/** @type {any} */ e) => e.evaluation && e.evaluation.heads);
    if (!evaluations.length) return;
    const heads = Object.keys(evaluations[0].evaluation.heads);
    this.chart(`evaluation:${heads.join()}`, () => new Chart({ label: t("curve.evaluation"), xLabel: t("curve.step"), format: number,
      series: heads.map((head, i) => ({ label: `${head} macro-F1`, colour: COLOURS[i % COLOURS.length] })) })).show([
      evaluations.map((/** @type {any} */ e) => e.step ?? 0),
      ...heads.map((head) => evaluations.map((/** @type {any} */ e) => (e.evaluation.heads[head] || {}).macro_f1 ?? null)),
    ]);
  }

  showMemory() {
    const { budget_bytes: budget, planned_peak_bytes: planned, ranks } = this.memory;
    for (const rank of ranks) {
      const points = rank.series.points;
      if (!points.length) continue;
      const began = points[0].time;
      const line = (/** @type {number | null} */ value) => points.map(() => value);
      const name = t("memory.rank", { rank: rank.rank });
      this.chart(`memory:${rank.rank}:${budget ? 1 : 0}`, () => new Chart({
        label: `${t("job.memory")}, ${name}`, xLabel: t("curve.seconds"), format: bytes, height: 220,
        series: [
          { label: t("memory.allocated"), colour: "--series-1" },
          { label: t("memory.peak"), colour: "--series-2" },
          { label: t("memory.planned_peak"), colour: "--series-3", dashed: true },
          { label: t("plan.budget"), colour: "--series-5", dashed: true },
        ] })).show([
        points.map((/** @type {any} */ p) => p.time - began),
        points.map((/** @type {any} */ p) => p.allocated_bytes),
        points.map((/** @type {any} */ p) => p.peak_allocated_bytes),
        line(planned), line(budget),
      ]);
    }
  }

  async cancel() {
    this.job = await request("POST", `/jobs/${this.id}/cancel`);
  }

  /** @param {any} body of POST /jobs/{id}/retry */
  async retry(body) {
    const job = await request("POST", `/jobs/${this.id}/retry`, {
      json: body, headers: { "Idempotency-Key": this.retryKey },
    });
    sessionStorage.removeItem(draftKey(this.id));
    location.hash = `#/job/${job.id}`;
  }

  render() {
    const { job } = this;
    if (!job) {
      return html`<h1>${t("job.title")}</h1>${this.problem ? problemView(this.problem)
        : html`<p aria-busy="true">${t("loading")}</p>`}`;
    }
    return html`
      <h1>${job.name || shortId(job.id)} ${stateView(job.state)}</h1>
      <p class="small">${t(`kind.${job.kind}`)} · <code>${job.id}</code> · ${this.relatives()}</p>
      ${this.headline()}
      ${this.actions.render()}
      ${this.buttons()}
      ${this.diagnosis()}
      ${this.curves()}
      ${this.memoryView()}
      ${this.planView()}
      ${this.attempts()}
      ${this.logView()}
      ${this.settings()}`;
  }

  relatives() {
    const { job } = this;
    const link = (/** @type {string} */ id) => html`<a href="#/job/${id}">${shortId(id)}</a>`;
    return html`<a href="#/datasets/${job.dataset_id}">${t("job.dataset")}</a>
      ${job.parent_job_id ? html` · ${t("job.teacher")} ${link(job.parent_job_id)}` : nothing}
      ${job.child_job_ids.length ? html` · ${t("job.students")} ${job.child_job_ids.map(
        (/** @type {string} */ id) => html`${link(id)} `)}` : nothing}
      ${job.retry_of ? html` · ${t("job.retry_of")} ${link(job.retry_of)}` : nothing}
      ${job.model_id ? html` · <a href="#/models/${job.model_id}">${t("job.model")}</a>` : nothing}
      ${job.created_by ? html` · ${job.created_by}` : nothing}`;
  }

  headline() {
    const { job } = this;
    const progress = job.progress || {};
    const facts = [
      [t("jobs.created"), moment(job.created_at)],
      [t("jobs.time"), job.started_at ? duration(secondsBetween(job.started_at, job.ended_at)) : "–"],
      [t("job.phase"), job.phase ? t(`phase.${job.phase}`) : "–"],
      [t("job.eta"), this.isOver() ? "–" : duration(progress.eta_seconds)],
      [t("curve.loss"), number(progress.loss)],
      [t("curve.tokens_per_second"), number(progress.tokens_per_second)],
    ];
    return html`<div class="panel">
      ${progressView(job)}
      <dl class="facts">${facts.map(([name, value]) => html`<div><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>
      ${job.reason ? html`<p class="reason"><b>${t(`reason.${job.reason}`)}</b></p>` : nothing}
      ${job.message ? html`<p class="message">${job.message}</p>` : nothing}
    </div>`;
  }

  buttons() {
    const { job } = this;
    if (!this.context.can("submit")) return nothing;
    const canRetry = job.state === "failed" || job.state === "cancelled";
    return html`<div class="actions">
      ${this.isOver() ? nothing : actionView({
        label: t("job.cancel"), kind: "danger", run: () => this.cancel(), disabled: job.state === "cancelling",
        command: curl("POST", `/jobs/${job.id}/cancel`) }, this.actions)}
      ${canRetry ? actionView({ label: t("job.retry"), run: () => this.retry({}),
        command: curl("POST", `/jobs/${job.id}/retry`, {}) }, this.actions) : nothing}
      <div class="action"><a class="button" href="#/new?from=${job.id}">${t("job.copy")}</a></div>
    </div>
    ${canRetry ? this.retryForm() : nothing}`;
  }

  retryForm() {
    return html`<details class="panel" @toggle=${() => this.openRetry()}>
      <summary>${t("job.retry_changed")}</summary>
      ${this.schemas ? html`<form @submit=${(/** @type {Event} */ e) => e.preventDefault()}><div class="fields">
        ${schemaForm(this.schemas.RetryRequest, this.retryBody, {
          schemas: this.schemas, open: ["changes"], prefix: "retry",
          errorOf: (path) => (this.actions.problem instanceof Problem ? this.actions.problem.of(path) : undefined),
          onChange: (value) => {
            this.retryBody = value;
            this.retryKey = idempotencyKey();
            sessionStorage.setItem(draftKey(this.id), JSON.stringify(value));
            this.context.update();
          } })}</div>
        ${actionView({ label: t("job.retry_now"), kind: "primary", run: () => this.retry(this.retryBody),
          command: curl("POST", `/jobs/${this.id}/retry`, this.retryBody) }, this.actions)}</form>`
        : html`<p aria-busy="true">${t("loading")}</p>`}
    </details>`;
  }

  async openRetry() {
    if (this.schemas) return;
    this.schemas = await loadSchemas().catch(() => null);
    this.context.update();
  }

  diagnosis() {
    const { job } = this;
    if (!job.diagnosis) return nothing;
    const failed = [...job.attempts].reverse().find((/** @type {any} */ each) => each.diagnosis);
    const phase = failed && failed.failure && failed.failure.phase;
    const plan = (failed && failed.plan) || job.plan;
    const canRetry = this.context.can("submit") && (job.state === "failed" || job.state === "cancelled");
    return diagnosisView(job.diagnosis, {
      phase,
      components: plan && plan.phase_components && (plan.phase_components[phase] || plan.components),
      budget: plan && plan.budget_bytes,
      actions: this.actions,
      retry: canRetry ? (remedy) => this.retry({ changes: remedy.changes }) : undefined,
      command: (remedy) => curl("POST", `/jobs/${job.id}/retry`, { changes: remedy.changes }),
    });
  }

  curves() {
    const shown = [...this.charts].filter(([name]) => !name.startsWith("memory"));
    if (!shown.length) return nothing;
    const { total, stride } = this.metrics.series;
    return html`<section class="panel" aria-labelledby="curves-title"><h2 id="curves-title">${t("job.curves")}</h2>
      <div class="charts">${shown.map(([, chart]) => html`<div><h3>${chart.options.label}</h3>${chart.element}</div>`)}</div>
      <p class="small">${t("job.points", { total: number(total), stride: number(stride) })}</p>
      ${curlView(curl("GET", url(`/jobs/${this.id}/metrics`, { attempt: this.attempt, points: POINTS })))}</section>`;
  }

  memoryView() {
    if (!this.memory || !this.memory.ranks.length) return nothing;
    return html`<section class="panel" aria-labelledby="memory-title"><h2 id="memory-title">${t("job.memory")}</h2>
      ${this.memory.ranks.map((/** @type {any} */ rank) => this.rank(rank))}
      ${curlView(curl("GET", url(`/jobs/${this.id}/memory`, { attempt: this.attempt, points: POINTS })))}</section>`;
  }

  /** @param {any} rank */
  rank(rank) {
    const chart = [...this.charts].find(([name]) => name.startsWith(`memory:${rank.rank}:`));
    const name = t("memory.rank", { rank: rank.rank });
    return html`<h3>${name} <span class="small">${rank.basis ? t("memory.basis", { basis: rank.basis }) : ""}</span></h3>
      ${chart ? chart[1].element : nothing}
      <div class="scroll" tabindex="0" role="region" aria-label=${name}><table>
        <thead><tr><th scope="col">${t("job.phase")}</th><th scope="col">${t("memory.planned")}</th>
          <th scope="col">${t("memory.measured")}</th><th scope="col">${t("memory.difference")}</th></tr></thead>
        <tbody>${Object.entries(rank.phases).map(([phase, found]) => html`<tr>
          <th scope="row">${known(`plan_phase.${phase}`) || phase}</th><td>${bytes(found.planned_bytes)}</td>
          <td>${bytes(found.measured_bytes)}</td><td>${found.comparable && found.planned_bytes && found.measured_bytes
            ? percent(found.measured_bytes / found.planned_bytes - 1)
            : found.measured_bytes ? t("memory.not_comparable") : "–"}</td></tr>`)}</tbody></table></div>`;
  }

  planView() {
    const plan = this.job.plan;
    if (!plan) return nothing;
    return html`<details class="panel"><summary>${t("plan.title")} ${verdictView(plan.verdict)}
      <span class="small">${bytes(plan.peak_bytes)} / ${bytes(plan.budget_bytes)}</span></summary>
      ${stackedBar({ parts: partsOf(plan.components), budget: plan.budget_bytes, title: t("plan.components") })}</details>`;
  }

  attempts() {
    const { attempts } = this.job;
    if (!attempts.length) return nothing;
    return html`<section class="panel" aria-labelledby="attempts-title"><h2 id="attempts-title">${t("job.attempts")}</h2>
      <div class="scroll" tabindex="0" role="region" aria-label=${t("job.attempts")}><table>
        <thead><tr><th scope="col">#</th><th scope="col">${t("job.worker")}</th><th scope="col">${t("jobs.time")}</th>
          <th scope="col">${t("job.ending")}</th><th scope="col">${t("job.message")}</th></tr></thead>
        <tbody>${attempts.map((/** @type {any} */ each) => html`<tr>
          <th scope="row"><button type="button" class="link" aria-pressed=${this.isShown(each.number)}
            @click=${() => this.context.setQuery({ attempt: each.number })}>${each.number}</button></th>
          <td>${each.worker}</td><td>${duration(secondsBetween(each.started_at, each.ended_at))}</td>
          <td>${each.reason ? t(`reason.${each.reason}`) : each.ending || t("state.running")}</td>
          <td>${each.message || "–"}</td></tr>`)}</tbody></table></div></section>`;
  }

  /** @param {number} attempt */
  isShown(attempt) {
    return String(attempt) === (this.attempt || String(this.job.attempt)) ? "true" : "false";
  }

  logView() {
    return html`<section class="panel" aria-labelledby="log-title"><h2 id="log-title">${t("job.log")}</h2>
      <pre class="log" tabindex="0" aria-labelledby="log-title">${this.log || t("job.log.empty")}</pre>
      ${curlView(curl("GET", url(`/jobs/${this.id}/logs`, { attempt: this.attempt, tail_bytes: LOG_BYTES })))}</section>`;
  }

  settings() {
    return html`<details class="panel"><summary>${t("job.spec")}</summary>
      <pre tabindex="0">${JSON.stringify(this.job.spec, null, 2)}</pre>
      ${curlView(curl("GET", `/jobs/${this.id}`))}</details>`;
  }
}

/** @param {string} id */
function draftKey(id) {
  return `retry:${id}`;
}

/** @param {string} id @returns {any} what was entered before the page was reloaded */
function readDraft(id) {
  try {
    return JSON.parse(sessionStorage.getItem(draftKey(id)) || "{}");
  } catch {
    return {};
  }
}
