// @ts-check
// The list of jobs: one stream keeps all of its rows current.
import { html, nothing, repeat } from "../lit.js";
import { t } from "../messages.js";
import { request, url, Stream, curl } from "../api.js";
import { duration, moment, secondsBetween } from "../format.js";
import { curlView, problemView, progressView, stateView } from "../parts.js";

const STATES = ["waiting", "queued", "running", "cancelling", "succeeded", "failed", "cancelled"];
const PAGE = 50;
const SEARCH_MILLISECONDS = 300;

/** @param {import("../main.js").Context} context @returns {import("../main.js").Page} */
export function create(context) {
  const list = new JobList(context);
  return list;
}

class JobList {
  /** @param {import("../main.js").Context} context */
  constructor(context) {
    this.context = context;
    this.filters = filtersOf(context.query);
    /** @type {Map<string, any>} in order, the newest first */
    this.jobs = new Map();
    /** @type {string | null} */
    this.next = null;
    this.isLoading = true;
    /** @type {any} */
    this.problem = null;
    this.version = 0;
    this.searchTimer = 0;
    this.isStopped = false;
    // The rows first: they are what somebody waits for. The stream says `ready` when it misses nothing more.
    this.load();
    this.stream = new Stream("/jobs/events", (type, data) => this.onEvent(type, data));
  }

  stop() {
    this.isStopped = true;
    this.stream.close();
  }

  /** @param {URLSearchParams} query */
  change(query) {
    const filters = filtersOf(query);
    if (JSON.stringify(filters) === JSON.stringify(this.filters)) return;
    this.filters = filters;
    this.load();
  }

  /** @param {string} type @param {any} data */
  onEvent(type, data) {
    if (type === "ready" || type === "reload") this.refresh();
    else if (type === "job") this.take(data);
  }

  /** @param {any} job a JobSummary that has changed */
  take(job) {
    if (this.jobs.has(job.id)) {
      if (this.matches(job)) this.jobs.set(job.id, job);
      else this.jobs.delete(job.id);
    } else if (this.matches(job)) {
      const first = this.jobs.keys().next().value;
      if (first !== undefined && job.id < first) return;  // of a page further down
      this.jobs = new Map([[job.id, job], ...this.jobs]);
    }
    this.context.update();
  }

  /** @param {any} job */
  matches(job) {
    const { state, kind, search, created_by: createdBy } = this.filters;
    const wanted = (search || "").toLowerCase();
    return (!state || job.state === state) && (!kind || job.kind === kind)
      && (!createdBy || job.created_by === createdBy)
      && (!wanted || (job.name || "").toLowerCase().includes(wanted) || job.id.includes(search));
  }

  path(/** @type {string | null} */ cursor = null) {
    return url("/jobs", { ...this.filters, limit: PAGE, cursor });
  }

  async load() {
    const version = ++this.version;
    this.isLoading = true;
    this.context.update();
    try {
      const page = await request("GET", this.path());
      if (version !== this.version) return;
      this.jobs = new Map(page.items.map((/** @type {any} */ job) => [job.id, job]));
      this.next = page.next_cursor;
      this.problem = null;
    } catch (error) {
      if (version === this.version) this.problem = error;
    }
    this.isLoading = false;
    this.context.update();
  }

  /** Read the newest page again, after the stream was away; rows further down stay. */
  async refresh() {
    const version = this.version;
    try {
      const page = await request("GET", this.path());
      if (version !== this.version || this.isStopped) return;
      const fresh = new Map(page.items.map((/** @type {any} */ job) => [job.id, job]));
      for (const [id, job] of this.jobs) if (!fresh.has(id)) fresh.set(id, job);
      if (this.jobs.size <= PAGE) this.next = page.next_cursor;
      this.jobs = fresh;
      this.problem = null;
    } catch (error) {
      if (this.jobs.size === 0) this.problem = error;
    }
    this.context.update();
  }

  async more() {
    const version = this.version;
    this.isLoading = true;
    this.context.update();
    try {
      const page = await request("GET", this.path(this.next));
      if (version !== this.version) return;
      for (const job of page.items) this.jobs.set(job.id, job);
      this.next = page.next_cursor;
    } catch (error) {
      this.problem = error;
    }
    this.isLoading = false;
    this.context.update();
  }

  /** @param {string} text */
  search(text) {
    clearTimeout(this.searchTimer);
    this.searchTimer = setTimeout(() => this.context.setQuery({ search: text }), SEARCH_MILLISECONDS);
  }

  render() {
    const { filters } = this;
    return html`
      <h1>${t("nav.jobs")}</h1>
      <form class="filters" role="search" @submit=${(/** @type {Event} */ e) => e.preventDefault()}>
        <label>${t("jobs.search")}
          <input type="search" .value=${filters.search || ""} maxlength="120"
            @input=${(/** @type {any} */ e) => this.search(e.target.value)}></label>
        ${this.select("state", STATES, (each) => t(`state.${each}`))}
        ${this.select("kind", ["teacher", "distill"], (each) => t(`kind.${each}`))}
        <label>${t("jobs.owner")}
          <input .value=${filters.created_by || ""} maxlength="120"
            @change=${(/** @type {any} */ e) => this.context.setQuery({ created_by: e.target.value })}></label>
      </form>
      ${problemView(this.problem)}
      ${this.table()}
      ${this.next ? html`<button type="button" ?disabled=${this.isLoading}
        @click=${() => this.more()}>${t("more")}</button>` : nothing}
      ${curlView(curl("GET", this.path()))}`;
  }

  /** @param {string} name @param {string[]} values @param {(value: string) => string} label */
  select(name, values, label) {
    const current = this.filters[name] || "";
    return html`<label>${t(`jobs.${name}`)}
      <select @change=${(/** @type {any} */ e) => this.context.setQuery({ [name]: e.target.value })}>
        <option value="" ?selected=${!current}>${t("any")}</option>
        ${values.map((each) => html`<option value=${each} ?selected=${current === each}>${label(each)}</option>`)}
      </select></label>`;
  }

  table() {
    if (!this.jobs.size) {
      return this.isLoading ? html`<p aria-busy="true">${t("loading")}</p>` : html`<p>${t("jobs.none")}
        ${this.context.can("submit") ? html`<a href="#/new">${t("nav.new")}</a>` : nothing}</p>`;
    }
    return html`<div class="scroll" tabindex="0" role="region" aria-label=${t("nav.jobs")}>
      <table class="jobs">
        <thead><tr>
          <th scope="col">${t("jobs.name")}</th><th scope="col">${t("jobs.state")}</th>
          <th scope="col">${t("job.progress")}</th><th scope="col">${t("jobs.time")}</th>
          <th scope="col">${t("jobs.owner")}</th><th scope="col">${t("jobs.created")}</th>
        </tr></thead>
        <tbody>${repeat([...this.jobs.values()], (job) => job.id, (job) => this.row(job))}</tbody>
      </table></div>`;
  }

  /** @param {any} job */
  row(job) {
    const isRunning = job.state === "running" || job.state === "cancelling";
    const eta = isRunning && job.progress ? job.progress.eta_seconds : null;
    return html`<tr data-job=${job.id} data-state=${job.state}>
      <th scope="row">${this.lineage(job)}
        <span class="small">${t(`kind.${job.kind}`)}${job.retry_of ? html` · ${t("job.retry_of")}
          <a href="#/job/${job.retry_of}">${shortId(job.retry_of)}</a>` : nothing}</span></th>
      <td>${stateView(job.state)} <span class="small">${job.reason && job.state !== "succeeded"
        ? t(`reason.${job.reason}`) : isRunning && job.phase ? t(`phase.${job.phase}`) : ""}</span></td>
      <td>${progressView(job)}${eta ? html`<span class="small"> ${t("jobs.eta", { time: duration(eta) })}</span>` : nothing}</td>
      <td>${job.started_at ? duration(secondsBetween(job.started_at, job.ended_at)) : "–"}</td>
      <td>${job.created_by || "–"}</td>
      <td>${moment(job.created_at)}</td>
    </tr>`;
  }

  /** @param {any} job the chain of a student: its teacher first */
  lineage(job) {
    const own = html`<a href="#/job/${job.id}">${job.name || shortId(job.id)}</a>`;
    if (!job.parent_job_id) return own;
    const parent = this.jobs.get(job.parent_job_id);
    const name = parent && parent.name ? parent.name : shortId(job.parent_job_id);
    return html`<span class="chain"><a href="#/job/${job.parent_job_id}">${name}</a>
      <span aria-label=${t("jobs.teaches")} role="img">→</span> ${own}</span>`;
  }
}

/** @param {URLSearchParams} query @returns {Record<string, string | undefined>} */
function filtersOf(query) {
  /** @type {Record<string, string | undefined>} */
  const filters = {};
  for (const name of ["state", "kind", "search", "created_by"]) {
    const value = query.get(name);
    if (value) filters[name] = value;
  }
  return filters;
}

/** @param {string} id */
export function shortId(id) {
  return id.length > 16 ? `${id.slice(0, 4)}…${id.slice(-6)}` : id;
}
