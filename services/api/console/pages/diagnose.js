// @ts-check
// Any out-of-memory log: paste it, say what is known of the job, and read the same diagnosis as for a job of ours.
import { html, nothing } from "../lit.js";
import { t } from "../messages.js";
import { request, curl } from "../api.js";
import { Actions, actionView, curlView } from "../parts.js";
import { diagnosisView } from "../diagnosis.js";

const DRAFT = "diagnose";
const TEXTS = ["model_name", "framework", "sharding_strategy", "wrap_policy", "optimizer", "precision", "device", "phase"];
const NUMBERS = ["ranks", "micro_batch", "sequence_length", "device_memory_bytes", "host_memory_bytes", "exit_code", "step"];

/** @param {import("../main.js").Context} context @returns {import("../main.js").Page} */
export function create(context) {
  return new DiagnosePage(context);
}

class DiagnosePage {
  /** @param {import("../main.js").Context} context */
  constructor(context) {
    this.context = context;
    /** @type {Record<string, any>} */
    this.known = JSON.parse(sessionStorage.getItem(DRAFT) || "{}");
    /** @type {any} */
    this.diagnosis = null;
    this.actions = new Actions();
  }

  /** @param {string} name @param {any} value */
  set(name, value) {
    if (value === "" || Number.isNaN(value)) delete this.known[name];
    else this.known[name] = value;
    sessionStorage.setItem(DRAFT, JSON.stringify(this.known));
    this.context.update();
  }

  async diagnose() {
    this.diagnosis = await request("POST", "/diagnoses", { json: this.known });
  }

  render() {
    return html`<h1>${t("nav.diagnose")}</h1><p>${t("diagnose.hint")}</p>
      <form class="panel" @submit=${(/** @type {Event} */ e) => e.preventDefault()}>
        <label for="log">${t("diagnose.log")}</label>
        <textarea id="log" rows="10" spellcheck="false" .value=${this.known.log || ""}
          @input=${(/** @type {any} */ e) => this.set("log", e.target.value)}></textarea>
        <fieldset><legend>${t("diagnose.known")}</legend><div class="fields">
          ${TEXTS.map((name) => this.field(name, "text", (text) => text))}
          ${NUMBERS.map((name) => this.field(name, "number", (text) => (text === "" ? "" : Number(text))))}
        </div></fieldset>
        ${actionView({ label: t("diagnose.run"), kind: "primary", run: () => this.diagnose(),
          disabled: !this.known.log }, this.actions)}
        ${curlView(curl("POST", "/diagnoses", this.known))}
      </form>
      ${this.actions.render()}
      ${this.diagnosis ? diagnosisView(this.diagnosis) : nothing}`;
  }

  /** @param {string} name @param {string} type @param {(text: string) => any} parse */
  field(name, type, parse) {
    return html`<div class="field"><label for=${`known-${name}`}>${t(`case.${name}`)}</label>
      <input id=${`known-${name}`} type=${type} step="any" .value=${String(this.known[name] ?? "")} autocomplete="off"
        @input=${(/** @type {any} */ e) => this.set(name, parse(e.target.value))}></div>`;
  }
}
