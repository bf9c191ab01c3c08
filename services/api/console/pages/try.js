// @ts-check
// Texts in, scores out: two aliases side by side, with their version and the time of each stage.
import { html, svg, nothing } from "../lit.js";
import { t } from "../messages.js";
import { request, send, url, curl } from "../api.js";
import { number, percent } from "../format.js";
import { Actions, actionView, curlView, problemView } from "../parts.js";

const DRAFT = "try-texts";
const MAX_LABELS = 10;

/** @param {import("../main.js").Context} context @returns {import("../main.js").Page} */
export function create(context) {
  return new TryPage(context);
}

class TryPage {
  /** @param {import("../main.js").Context} context */
  constructor(context) {
    this.context = context;
    this.texts = sessionStorage.getItem(DRAFT) || "";
    this.truncate = true;
    /** @type {Record<string, any>} */
    this.served = {};
    /** @type {any[]} */
    this.answers = [];
    this.actions = new Actions();
    this.aliases = aliasesOf(context.query);
    this.load();
  }

  async load() {
    this.served = (await request("GET", "/health").catch(() => ({ models: {} }))).models;
    if (!this.context.query.get("alias")) {
      this.aliases = ["default", ...Object.keys(this.served).filter((alias) => alias !== "default")].slice(0, 2);
    }
    this.context.update();
  }

  /** @param {URLSearchParams} query */
  change(query) {
    this.aliases = aliasesOf(query);
  }

  /** @returns {any} */
  body() {
    const texts = this.texts.split("\n").filter((line) => line.trim());
    return { inputs: texts, detail: true, truncate: this.truncate, top_k: MAX_LABELS };
  }

  async run() {
    const body = this.body();
    this.answers = await Promise.all(this.aliases.map(async (alias) => {
      try {
        const response = await send("POST", url("/predict", { alias }), { json: body });
        return { alias, texts: body.inputs, answer: await response.json(), version: response.headers.get("x-model-version"),
          timing: parseTiming(response.headers.get("server-timing")) };
      } catch (problem) {
        return { alias, problem };
      }
    }));
    this.served = (await request("GET", "/health").catch(() => ({ models: this.served }))).models;
  }

  render() {
    const known = [...new Set(["default", ...Object.keys(this.served), ...this.aliases])];
    return html`<h1>${t("nav.try")}</h1>
      <form class="panel" @submit=${(/** @type {Event} */ e) => e.preventDefault()}>
        <label for="texts">${t("try.texts")}</label>
        <textarea id="texts" rows="5" .value=${this.texts} @input=${(/** @type {any} */ e) => {
          this.texts = e.target.value;
          sessionStorage.setItem(DRAFT, this.texts);
          this.context.update();
        }}></textarea>
        <fieldset><legend>${t("try.aliases")}</legend>${known.map((alias) => html`<label><input type="checkbox"
          .checked=${this.aliases.includes(alias)} @change=${(/** @type {any} */ e) => this.choose(alias, e.target.checked)}>
          ${alias} <span class="small">${this.served[alias] ? this.served[alias].version : t("try.not_served")}</span></label> `)}</fieldset>
        <label><input type="checkbox" .checked=${this.truncate} @change=${(/** @type {any} */ e) => {
          this.truncate = e.target.checked;
          this.context.update();
        }}> ${t("try.truncate")}</label>
        ${actionView({ label: t("try.run"), kind: "primary", run: () => this.run(), disabled: !this.texts.trim() || !this.aliases.length }, this.actions)}
        ${this.aliases.map((alias) => curlView(curl("POST", url("/predict", { alias }), this.body())))}
      </form>
      ${this.actions.render()}
      <div class="sides" aria-live="polite">${this.answers.map((each) => this.side(each))}</div>`;
  }

  /** @param {string} alias @param {boolean} isChosen */
  choose(alias, isChosen) {
    const next = isChosen ? [...this.aliases, alias] : this.aliases.filter((each) => each !== alias);
    this.context.setQuery({ alias: next.join(",") });
  }

  /** @param {any} side */
  side(side) {
    return html`<section class="panel answer-side" data-alias=${side.alias}><h2>${side.alias}</h2>
      ${side.problem ? problemView(side.problem) : html`
        <p class="small">${side.answer.model} · <code class="version">${side.version}</code></p>
        <p class="small timing">${side.timing.map(([stage, ms]) => html`${stage} ${number(ms, 2)} ms · `)}${
          t("try.tokens", { tokens: number(side.answer.usage.prompt_tokens ?? side.answer.usage.total_tokens) })}</p>
        ${side.answer.data.map((/** @type {any} */ each) => html`<h3>${side.texts[each.index]}</h3>
          ${each.truncated ? html`<p class="small">${t("try.truncated")}</p>` : nothing}
          ${Object.entries(each.heads).map(([head, found]) => html`<p><b>${head}</b></p>
            <div class="bars">${/** @type {any} */ (found).scores.map((/** @type {any} */ score) => html`
              <span class="label">${score.label}${score.predicted ? " ✓" : ""}</span>
              <svg aria-hidden="true">${svg`<rect class="fill-0" height="100%" width="${100 * Math.max(0, Math.min(1, score.score))}%"></rect>`}</svg>
              <span class="value">${percent(score.score)}</span>`)}</div>`)}`)}`}</section>`;
  }
}

/** @param {URLSearchParams} query @returns {string[]} */
function aliasesOf(query) {
  return (query.get("alias") || "default").split(",").filter(Boolean);
}

/** @param {string | null} header @returns {[string, number][]} stages and their milliseconds */
function parseTiming(header) {
  return (header || "").split(",").filter(Boolean).map((part) => {
    const [name, ...rest] = part.trim().split(";");
    const found = rest.find((each) => each.trim().startsWith("dur="));
    return [name, found ? Number(found.trim().slice(4)) : 0];
  });
}
