// @ts-check
// What jobs run on: each worker with the doctor's findings of its machine, the queue, the disk.
import { html, svg, nothing } from "../lit.js";
import { t, known } from "../messages.js";
import { request, curl } from "../api.js";
import { bytes, moment, number, percent } from "../format.js";
import { curlView, problemView } from "../parts.js";

const REFRESH_MILLISECONDS = 5000;
const STATES = ["waiting", "queued", "running", "cancelling"];

/** @param {import("../main.js").Context} context @returns {import("../main.js").Page} */
export function create(context) {
  return new NodePage(context);
}

class NodePage {
  /** @param {import("../main.js").Context} context */
  constructor(context) {
    this.context = context;
    /** @type {any} */
    this.node = null;
    /** @type {any} */
    this.health = null;
    /** @type {any[]} */
    this.devices = [];
    this.problem = /** @type {any} */ (null);
    this.timer = 0;
    this.isStopped = false;
    request("GET", "/devices").then((found) => {
      this.devices = found.items;
      context.update();
    }, () => {});
    this.load();
  }

  stop() {
    this.isStopped = true;
    clearTimeout(this.timer);
  }

  async load() {
    try {
      [this.node, this.health] = await Promise.all([request("GET", "/node"), request("GET", "/health")]);
      this.problem = null;
    } catch (error) {
      this.problem = error;
    }
    if (this.isStopped) return;
    this.context.update();
    this.timer = setTimeout(() => this.load(), REFRESH_MILLISECONDS);
  }

  render() {
    return html`<h1>${t("nav.node")}</h1>${problemView(this.problem)}
      ${this.node ? html`${this.parts()}${this.queue()}${this.disk()}${this.workers()}${this.deviceTable()}` : this.problem ? nothing
        : html`<p aria-busy="true">${t("loading")}</p>`}
      ${curlView(curl("GET", "/node"))}`;
  }

  parts() {
    const { health } = this;
    return html`<section class="panel"><h2>${t("node.parts")}</h2>
      <ul class="legend">${Object.entries(health.parts).map(([name, found]) => html`<li>
        <span class="tag ${/** @type {any} */ (found).ok ? "passed" : "refused"}">${name}</span>
        ${number(/** @type {any} */ (found).milliseconds, 1)} ms ${/** @type {any} */ (found).problem || ""}</li>`)}</ul>
      ${health.warnings.length ? html`<ul>${health.warnings.map((/** @type {string} */ each) => html`<li>${each}</li>`)}</ul>` : nothing}</section>`;
  }

  queue() {
    const count = (/** @type {string} */ kind, /** @type {string} */ state) => {
      const found = this.node.jobs.find((/** @type {any} */ each) => each.kind === kind && each.state === state);
      return found ? found.jobs : 0;
    };
    return html`<section class="panel"><h2>${t("node.queue")}</h2><table><thead><tr><td></td>
      ${STATES.map((state) => html`<th scope="col">${t(`state.${state}`)}</th>`)}</tr></thead>
      <tbody>${["teacher", "distill"].map((kind) => html`<tr><th scope="row">${t(`kind.${kind}`)}</th>
        ${STATES.map((state) => html`<td><a href="#/jobs?state=${state}&kind=${kind}">${number(count(kind, state))}</a></td>`)}</tr>`)}</tbody></table></section>`;
  }

  disk() {
    const { storage } = this.node;
    const share = storage.used_bytes / storage.total_bytes;
    return html`<section class="panel"><h2>${t("node.disk")}</h2>
      <figure class="stacked"><svg role="img" aria-label=${`${t("node.disk")}: ${percent(share)}`}>
        <rect class="track" width="100%" height="100%"></rect>${svg`<rect class="fill-0" height="100%" width="${100 * share}%"></rect>
        <line class="budget" x1="${100 * storage.full_share}%" x2="${100 * storage.full_share}%" y1="0" y2="100%"></line>`}</svg></figure>
      <p>${bytes(storage.used_bytes)} / ${bytes(storage.total_bytes)} (${percent(share)}), ${t("node.full_from", { share: percent(storage.full_share) })}
        ${storage.days_until_full !== null ? t("node.days", { days: number(storage.days_until_full, 0) }) : ""}</p>
      <ul class="legend">${Object.entries(storage.stored_bytes).map(([kind, size]) => html`<li>${kind} <b>${bytes(/** @type {any} */ (size))}</b></li>`)}</ul></section>`;
  }

  workers() {
    const { workers } = this.node;
    return html`<section class="panel"><h2>${t("node.workers")}</h2>${workers.length ? nothing : html`<p>${t("node.no_workers")}</p>`}
      ${workers.map((/** @type {any} */ worker) => html`<details ?open=${worker.healthy === false} data-worker=${worker.kind}>
        <summary><b>${worker.name}</b> <span class="tag ${worker.healthy === false ? "refused" : worker.healthy ? "passed" : ""}">${
          worker.healthy === null ? t("node.not_examined") : t(worker.healthy ? "node.healthy" : "node.unhealthy")}</span>
          <span class="small">${worker.device_kind || ""} · ${t("node.seen", { time: moment(worker.seen_at) })}</span></summary>
        <table><thead><tr><th scope="col">${t("node.check")}</th><th scope="col">${t("node.result")}</th><th scope="col">${t("node.detail")}</th></tr></thead>
          <tbody>${worker.checks.map((/** @type {any} */ check) => html`<tr><th scope="row">${check.name}</th>
            <td><span class="tag ${check.status === "ok" ? "passed" : check.status === "failed" ? "refused" : ""}">${known(`check.${check.status}`) || check.status}</span></td>
            <td>${check.detail}${check.remedy ? html`<p><b>→ ${check.remedy}</b></p>` : nothing}</td></tr>`)}</tbody></table></details>`)}
      <p class="small">${t("node.torch")}</p></section>`;
  }

  deviceTable() {
    if (!this.devices.length) return nothing;
    return html`<details class="panel"><summary>${t("node.devices")}</summary><table><thead><tr><th scope="col">${t("case.device")}</th>
      <th scope="col">${t("node.memory")}</th><th scope="col">${t("node.reserve")}</th></tr></thead>
      <tbody>${this.devices.map((each) => html`<tr><th scope="row">${each.name}</th><td>${bytes(each.memory_bytes)}</td>
        <td>${bytes(each.reserve_bytes)}</td></tr>`)}</tbody></table>${curlView(curl("GET", "/devices"))}</details>`;
  }
}
