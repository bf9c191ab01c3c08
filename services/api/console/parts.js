// @ts-check
// The parts that pages share: states, problems, stacked bars, commands.
import { html, svg, nothing } from "./lit.js";
import { t, known } from "./messages.js";
import { bytes } from "./format.js";
import { Problem } from "./api.js";

let update = () => {};

/** @param {() => void} callback what renders the page again */
export function setUpdate(callback) {
  update = callback;
}

/** @param {string | null | undefined} state */
export function stateView(state) {
  return state ? html`<span class="state state-${state}">${t(`state.${state}`)}</span>` : nothing;
}

/** @param {string | null | undefined} verdict */
export function verdictView(verdict) {
  return verdict ? html`<span class="verdict verdict-${verdict}">${t(`verdict.${verdict}`)}</span>` : nothing;
}

/** @param {any} error */
export function problemView(error) {
  if (!error) return nothing;
  const isProblem = error instanceof Problem;
  const errors = (isProblem && error.document.errors) || [];
  const references = (isProblem && error.document.references) || [];
  const title = isProblem ? known(`problem.${error.type}`) || error.title : t("problem.unexpected");
  return html`<div class="problem" role="alert">
    <strong>${title}</strong>
    <p>${error.message}</p>
    ${errors.length > 1 ? html`<ul>${errors.map((/** @type {any} */ e) =>
      html`<li><code>${e.field}</code> ${e.message}</li>`)}</ul>` : nothing}
    ${references.length ? html`<ul>${references.map((/** @type {any} */ r) => html`<li>${r}</li>`)}</ul>` : nothing}
  </div>`;
}

/** @param {string} command the command that does the same as the action next to it */
export function curlView(command) {
  return html`<details class="curl">
    <summary>curl</summary>
    <pre tabindex="0">${command}</pre>
    <button type="button" @click=${(/** @type {any} */ e) => copy(e.target, command)}>${t("copy")}</button>
  </details>`;
}

/** @param {HTMLElement} button @param {string} text */
async function copy(button, text) {
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = t("copied");
  } catch {
    button.textContent = t("copy.failed");
  }
}

const COLOURS = ["parameters", "gradients", "optimizer", "unsharded", "activations", "temporaries", "logits",
  "frozen_teacher", "inputs", "checkpoint", "reserve", "free"];

/** @param {string} name of a component @param {number} index @returns {number} of its colour */
export function colourOf(name, index) {
  const found = COLOURS.indexOf(name);
  return found >= 0 ? found : (index + 6) % 10;
}

/**
 * @typedef {{name: string, label?: string, bytes: number}} BarPart
 */

/**
 * A stacked bar against a budget, with its legend; the widths are shares of the larger of both.
 * @param {{parts: BarPart[], budget?: number | null, title: string}} bar
 */
export function stackedBar({ parts, budget, title }) {
  const shown = parts.filter((part) => part.bytes > 0);
  const total = shown.reduce((sum, part) => sum + part.bytes, 0);
  const scale = Math.max(total, budget || 0, 1);
  let left = 0;
  const rects = shown.map((part, index) => {
    const x = (100 * left) / scale;
    left += part.bytes;
    return svg`<rect class="fill-${colourOf(part.name, index)}" x="${x}%" y="0" height="100%"
      width="${(100 * part.bytes) / scale}%"></rect>`;
  });
  const words = shown.map((part) => `${labelOf(part)} ${bytes(part.bytes)}`).join(", ");
  return html`<figure class="stacked">
    <svg role="img" aria-label="${title}: ${bytes(total)}${budget ? ` / ${bytes(budget)}` : ""}. ${words}">
      <rect class="track" x="0" y="0" width="100%" height="100%"></rect>
      ${rects}
      ${budget ? svg`<line class="budget" x1="${(100 * budget) / scale}%" x2="${(100 * budget) / scale}%"
        y1="0" y2="100%"></line>` : nothing}
    </svg>
    <figcaption>
      <ul class="legend">${shown.map((part, index) => html`<li><span class="swatch back-${
        colourOf(part.name, index)}"></span>${labelOf(part)} <b>${bytes(part.bytes)}</b></li>`)}
      ${budget ? html`<li><span class="swatch budget-mark"></span>${t("plan.budget")} <b>${bytes(budget)}</b></li>`
        : nothing}</ul>
    </figcaption>
  </figure>`;
}

/** @param {BarPart} part */
function labelOf(part) {
  return part.label || known(`component.${part.name}`) || part.name;
}

/** @param {Record<string, number> | undefined} components @returns {BarPart[]} */
export function partsOf(components) {
  return Object.entries(components || {}).map(([name, size]) => ({ name, bytes: size }));
}

/** @param {any} job a JobSummary */
export function progressView(job) {
  const progress = job.progress || {};
  const total = progress.total_steps || 0;
  if (job.state === "succeeded") {
    return html`<progress max="1" value="1" aria-label=${t("job.progress")}></progress>`;
  }
  if (!total) return nothing;
  const step = progress.step || 0;
  return html`<progress max=${total} value=${step} aria-label=${t("job.progress")}></progress>
    <span class="small">${step} / ${total}</span>`;
}

/**
 * A button whose action may fail: disabled while it runs, its problem beside it.
 * @param {{label: string, run: () => Promise<any>, kind?: string, command?: string, disabled?: boolean}} action
 * @param {Actions} actions
 */
export function actionView(action, actions) {
  return html`<div class="action">
    <button type="button" class=${action.kind || ""} ?disabled=${action.disabled || actions.isRunning}
      @click=${() => actions.run(action.run)}>${action.label}</button>
    ${action.command ? curlView(action.command) : nothing}
  </div>`;
}

/** The actions of a page: one at a time, and the problem of the last. */
export class Actions {
  constructor() {
    this.isRunning = false;
    /** @type {any} */
    this.problem = null;
  }

  /** @param {() => Promise<any>} action */
  async run(action) {
    if (this.isRunning) return;
    this.isRunning = true;
    this.problem = null;
    update();
    try {
      await action();
    } catch (error) {
      this.problem = error;
    }
    this.isRunning = false;
    update();
  }

  render() {
    return this.problem ? problemView(this.problem) : nothing;
  }
}

/** @returns {string} a key under which a repeated request is the same request */
export function idempotencyKey() {
  const random = crypto.getRandomValues(new Uint8Array(16));
  return `console-${[...random].map((byte) => byte.toString(16).padStart(2, "0")).join("")}`;
}
