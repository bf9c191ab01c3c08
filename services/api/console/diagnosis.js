// @ts-check
// A diagnosis as a page: the answer first, then the arithmetic behind it.
import { html, nothing } from "./lit.js";
import { t, known } from "./messages.js";
import { bytes } from "./format.js";
import { actionView, partsOf, stackedBar, verdictView } from "./parts.js";

/**
 * @param {any} diagnosis the document of POST /diagnoses, or of a job
 * @param {{phase?: string, components?: Record<string, number>, budget?: number | null,
 *   retry?: (remedy: any) => Promise<any>, command?: (remedy: any) => string,
 *   actions?: import("./parts.js").Actions}} more what is known of a job of this platform
 */
export function diagnosisView(diagnosis, more = {}) {
  const message = diagnosis.message;
  return html`<section class="diagnosis" aria-labelledby="diagnosis-title">
    <div class="panel answer answer-${diagnosis.confidence}">
      <h2 id="diagnosis-title">${known(`cause.${diagnosis.cause}`) || diagnosis.cause}</h2>
      <p class="lead">${diagnosis.summary}</p>
      <p><span class="tag">${t(`confidence.${diagnosis.confidence}`)}</span>
        <span class="tag">${t(`sharded.${diagnosis.sharded}`)}</span></p>
      ${diagnosis.sharded_evidence.length ? html`<ul>${diagnosis.sharded_evidence.map(
        (/** @type {string} */ line) => html`<li>${line}</li>`)}</ul>` : nothing}
    </div>
    ${remediesView(diagnosis.remedies, more)}
    ${diagnosis.next_measurement ? html`<div class="panel"><h3>${t("diagnosis.next")}</h3>
      <p>${diagnosis.next_measurement}</p></div>` : nothing}
    ${message ? requestView(diagnosis) : nothing}
    ${message ? aliveView(message, more) : nothing}
    ${hypothesesView(diagnosis.hypotheses)}
    ${diagnosis.notes.length ? html`<div class="panel"><h3>${t("diagnosis.notes")}</h3>
      <ul>${diagnosis.notes.map((/** @type {string} */ note) => html`<li>${note}</li>`)}</ul></div>` : nothing}
  </section>`;
}

/** @param {any[]} remedies @param {any} more */
function remediesView(remedies, more) {
  if (!remedies.length) return nothing;
  return html`<div class="panel"><h3>${t("diagnosis.remedies")}</h3>
    ${more.retry ? html`<p>${t("diagnosis.remedies.hint")}</p>` : nothing}
    <ol class="remedies">${remedies.map((remedy) => html`<li>
      <p><b>${remedy.change}</b> ${verdictView(remedy.verdict)}</p>
      <p class="small">${t("diagnosis.peak_then")} <b>${bytes(remedy.predicted_peak_bytes)}</b>
        ${more.budget ? html`/ ${bytes(more.budget)}` : nothing} · ${t("diagnosis.costs")} ${remedy.costs || "–"}</p>
      ${more.retry && Object.keys(remedy.changes || {}).length ? actionView({
        label: t("diagnosis.retry_with"), kind: "primary remedy", run: () => more.retry(remedy),
        command: more.command && more.command(remedy),
      }, more.actions) : nothing}
    </li>`)}</ol></div>`;
}

/** @param {any} diagnosis */
function requestView(diagnosis) {
  const { message, request } = diagnosis;
  return html`<div class="panel"><h3>${t("diagnosis.asked")}</h3>
    <p class="lead">${bytes(message.requested_bytes)}</p>
    ${request.length ? html`<p>${t("diagnosis.candidates")}</p><ul>${request.map((/** @type {any} */ each) => html`<li>
      ${each.what} · ${bytes(each.bytes)} · ${each.dtype} · ${t(`match.${each.match}`)}</li>`)}</ul>` : nothing}
    <details><summary>${t("diagnosis.message")}</summary><pre tabindex="0">${message.text}</pre></details></div>`;
}

/** @param {any} message @param {any} more */
function aliveView(message, more) {
  const others = (message.other_processes_bytes || []).reduce((/** @type {number} */ a, /** @type {number} */ b) => a + b, 0);
  const accounts = [
    { name: "allocated", bytes: message.allocated_bytes || 0 },
    { name: "reserved_unallocated", bytes: message.reserved_unallocated_bytes || 0 },
    { name: "outside_torch", bytes: message.outside_torch_bytes || 0 },
    { name: "other_processes", bytes: others },
    { name: "free", bytes: message.free_bytes || 0 },
  ];
  const hasAccounts = accounts.some((part) => part.bytes > 0);
  if (!hasAccounts && !more.components) return nothing;
  return html`<div class="panel"><h3>${t("diagnosis.alive")}</h3>
    ${hasAccounts ? stackedBar({ parts: accounts, budget: message.total_bytes, title: t("diagnosis.alive") }) : nothing}
    ${more.components ? html`<p>${t("diagnosis.planned", { phase: known(`plan_phase.${more.phase}`) || more.phase || "" })}</p>
      ${stackedBar({ parts: partsOf(more.components), budget: more.budget, title: t("diagnosis.planned_short") })}` : nothing}
  </div>`;
}

/** @param {any[]} hypotheses */
function hypothesesView(hypotheses) {
  if (!hypotheses.length) return nothing;
  const left = hypotheses.filter((each) => each.status !== "excluded");
  const excluded = hypotheses.filter((each) => each.status === "excluded");
  return html`<div class="panel"><h3>${t("diagnosis.left")}</h3>${tableOf(left)}
    ${excluded.length ? html`<h3>${t("diagnosis.excluded")}</h3>${tableOf(excluded)}` : nothing}</div>`;
}

/** @param {any[]} hypotheses */
function tableOf(hypotheses) {
  if (!hypotheses.length) return html`<p>${t("none")}</p>`;
  return html`<div class="scroll" tabindex="0" role="region" aria-label=${t("diagnosis.explanations")}><table>
    <thead><tr><th scope="col">${t("diagnosis.explanation")}</th><th scope="col">${t("diagnosis.predicts")}</th>
      <th scope="col">${t("diagnosis.for")}</th><th scope="col">${t("diagnosis.against")}</th></tr></thead>
    <tbody>${hypotheses.map((each) => html`<tr>
      <th scope="row">${known(`cause.${each.cause}`) || each.cause}<span class="small">${each.what}${
        each.where ? ` · ${each.where}` : ""} · ${t(`status.${each.status}`)}</span></th>
      <td>${t("diagnosis.allocated")} ${bytes(each.predicted_allocated_bytes)}<br>
        ${t("diagnosis.request")} ${bytes(each.predicted_request_bytes)}</td>
      <td>${lines(each.for)}</td><td>${lines(each.against)}</td></tr>`)}</tbody></table></div>`;
}

/** @param {string[]} texts */
function lines(texts) {
  return texts.length ? html`<ul>${texts.map((text) => html`<li>${text}</li>`)}</ul>` : "–";
}
