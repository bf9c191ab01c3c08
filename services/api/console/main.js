// @ts-check
// Starts the console: session, language, theme, and the page that the URL names.
//
// The state of a view is in the URL (`#/jobs?state=failed`): reloading it, or sending it to somebody, shows the
// same. A page is an object: `render()` returns its template, `change(query)` follows the URL, `stop()` ends it.
import { html, nothing, render } from "./lit.js";
import { t, language, setLanguage, LANGUAGES } from "./messages.js";
import * as api from "./api.js";
import { curlView, problemView, setUpdate } from "./parts.js";

/**
 * @typedef {object} Page
 * @property {() => unknown} render
 * @property {(query: URLSearchParams) => void} [change]
 * @property {() => void} [stop]
 *
 * @typedef {object} Session
 * @property {string | null} key
 * @property {string} project
 * @property {string[]} scopes
 * @property {string | null} csrf_token
 *
 * @typedef {object} Context what a page gets
 * @property {string} path after the page's own part of the URL
 * @property {URLSearchParams} query
 * @property {() => void} update show what has changed
 * @property {(scope: string) => boolean} can whether the key permits it
 * @property {(changes: Record<string, any>) => void} setQuery change the URL without a new entry in the history
 */

/** @type {Record<string, () => Promise<{create: (context: Context) => Page}>>} */
const PAGES = {
  jobs: () => import("./pages/jobs.js"),
  job: () => import("./pages/job.js"),
  new: () => import("./pages/new_job.js"),
  diagnose: () => import("./pages/diagnose.js"),
  datasets: () => import("./pages/datasets.js"),
  models: () => import("./pages/models.js"),
  try: () => import("./pages/try.js"),
  node: () => import("./pages/node.js"),
};
const NAVIGATION = ["jobs", "new", "datasets", "models", "try", "diagnose", "node"];
const NEEDS = /** @type {Record<string, string>} */ ({ new: "submit", try: "predict" });
const RENEW_MILLISECONDS = 10 * 60 * 1000;

const root = /** @type {HTMLElement} */ (document.getElementById("console"));
const app = {
  session: /** @type {Session | null} */ (null),
  signedOut: false,
  signInProblem: /** @type {api.Problem | null} */ (null),
  page: /** @type {Page | null} */ (null),
  key: "",
  name: "",
  problem: /** @type {any} */ (null),
  theme: localStorage.getItem("theme") || "auto",
};

let isScheduled = false;

/** Render once before the next frame, however often it is called. */
function update() {
  if (isScheduled) return;
  isScheduled = true;
  queueMicrotask(() => {
    isScheduled = false;
    render(layout(), root);
  });
}

/** @param {string} scope */
function can(scope) {
  return Boolean(app.session && app.session.scopes.includes(scope));
}

function parseUrl() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  const [name, ...rest] = (path || "jobs").split("/");
  return { name: name || "jobs", path: rest.map(decodeURIComponent).join("/"), query: new URLSearchParams(query) };
}

async function route() {
  const { name, path, query } = parseUrl();
  const load = PAGES[name] || PAGES.jobs;
  const key = `${name}/${path}`;
  if (app.page && app.key === key) {
    if (app.page.change) app.page.change(query);
    update();
    return;
  }
  if (app.page && app.page.stop) app.page.stop();
  app.page = null;
  app.key = key;
  app.name = name;
  app.problem = null;
  update();
  try {
    const module = await load();
    if (app.key !== key) return;
    app.page = module.create({ path, query, update, can, setQuery });
  } catch (error) {
    app.problem = error;
  }
  update();
  scrollTo(0, 0);
}

/** @param {Record<string, any>} changes */
function setQuery(changes) {
  const { query } = parseUrl();
  for (const [name, value] of Object.entries(changes)) {
    if (value === undefined || value === null || value === "") query.delete(name);
    else query.set(name, String(value));
  }
  const text = query.toString();
  const path = location.hash.split("?")[0] || "#/jobs";
  history.replaceState(null, "", text ? `${path}?${text}` : path);
  if (app.page && app.page.change) app.page.change(query);
  update();
}

/** @param {Session} session */
function takeSession(session) {
  app.session = session;
  app.signedOut = false;
  app.signInProblem = null;
  api.setCsrf(session.csrf_token);
}

/** @param {SubmitEvent} event */
async function signIn(event) {
  event.preventDefault();
  const form = /** @type {HTMLFormElement} */ (event.target);
  const field = /** @type {HTMLInputElement} */ (form.elements.namedItem("key"));
  try {
    takeSession(await api.request("POST", "/session", {
      headers: { Authorization: `Bearer ${field.value.trim()}` },
    }));
    field.value = "";
    const former = app.page;
    if (!former) await route();
    else if (former.change) former.change(parseUrl().query);
  } catch (error) {
    app.signInProblem = /** @type {api.Problem} */ (error);
  }
  update();
}

async function signOut() {
  await api.request("DELETE", "/session").catch(() => null);
  if (app.page && app.page.stop) app.page.stop();
  app.page = null;
  app.key = "";
  app.session = null;
  app.signedOut = true;
  api.setCsrf(null);
  update();
}

function signInForm() {
  return html`
    <section class="panel narrow" aria-labelledby="signin-title">
      <h1 id="signin-title">${t("signin.title")}</h1>
      <p>${t("signin.why")}</p>
      <form @submit=${signIn}>
        <label for="key">${t("signin.key")}</label>
        <input id="key" name="key" type="password" autocomplete="current-password" required>
        ${app.signInProblem ? problemView(app.signInProblem) : nothing}
        <button class="primary" type="submit">${t("signin.submit")}</button>
      </form>
      ${curlView(`curl ${location.origin}/session -H "Authorization: Bearer $STILLHOUSE_API_KEY"`)}
    </section>`;
}

/** @param {string} theme */
function setTheme(theme) {
  app.theme = theme;
  localStorage.setItem("theme", theme);
  document.documentElement.dataset.theme = theme;
  dispatchEvent(new Event("theme"));
  update();
}

/** @param {string} name */
function link(name) {
  const needed = NEEDS[name];
  if (needed && !can(needed)) return nothing;
  const isCurrent = app.name === name || (name === "jobs" && app.name === "job");
  return html`<a href="#/${name}" aria-current=${isCurrent ? "page" : nothing}>${t(`nav.${name}`)}</a>`;
}

function layout() {
  const { session } = app;
  return html`
    <a class="skip" href="#main" @click=${skip}>${t("nav.skip")}</a>
    <header>
      <a class="brand" href="#/jobs">Stillhouse</a>
      ${session ? html`<nav aria-label=${t("nav.label")}>${NAVIGATION.map(link)}</nav>` : nothing}
      <div class="tools">
        ${session && session.key ? html`<span class="who">${session.key} · ${session.project}</span>
          <button type="button" @click=${signOut}>${t("signout")}</button>` : nothing}
        <label class="hidden" for="theme">${t("theme.label")}</label>
        <select id="theme" @change=${(/** @type {any} */ e) => setTheme(e.target.value)}>
          ${["auto", "light", "dark"].map((each) => html`<option value=${each}
            ?selected=${app.theme === each}>${t(`theme.${each}`)}</option>`)}
        </select>
        <label class="hidden" for="language">${t("language.label")}</label>
        <select id="language" @change=${(/** @type {any} */ e) => changeLanguage(e.target.value)}>
          ${Object.entries(LANGUAGES).map(([code, name]) => html`<option value=${code} lang=${code}
            ?selected=${language() === code}>${name}</option>`)}
        </select>
      </div>
    </header>
    <div role="status" aria-live="polite">${api.isOffline()
      ? html`<p class="notice offline">${t("offline")}</p>` : nothing}</div>
    <main id="main" tabindex="-1">
      ${app.signedOut ? signInForm() : nothing}
      <div class=${app.signedOut ? "hidden-page" : "page"} ?inert=${app.signedOut}>${body()}</div>
    </main>`;
}

function body() {
  if (app.problem) return problemView(app.problem);
  return app.page ? app.page.render() : html`<h1>${t(`nav.${PAGES[app.name] ? app.name : "jobs"}`)}</h1>
    <p aria-busy="true">${t("loading")}</p>`;
}

/** @param {Event} event */
function skip(event) {
  event.preventDefault();
  /** @type {HTMLElement} */ (document.getElementById("main")).focus();
}

/** @param {string} code */
function changeLanguage(code) {
  setLanguage(code);
  document.documentElement.lang = language();
  update();
}

async function start() {
  document.documentElement.lang = language();
  document.documentElement.dataset.theme = app.theme;
  setUpdate(update);
  api.whenConnectionChanges(update);
  api.whenSignedOut(() => {
    app.signedOut = true;
    update();
  });
  addEventListener("hashchange", route);
  setInterval(renew, RENEW_MILLISECONDS);
  root.replaceChildren();  // what the page shows until its modules are there
  update();
  const loading = PAGES[parseUrl().name] || PAGES.jobs;
  loading();  // its code is fetched while the session is asked for
  try {
    takeSession(await api.request("GET", "/session"));
    await route();
  } catch (error) {
    if (!app.signedOut) app.problem = error;
    if (/** @type {any} */ (error).status === 0) setTimeout(startAgain, 2000);
  }
  update();
}

async function startAgain() {
  app.problem = null;
  try {
    takeSession(await api.request("GET", "/session"));
    await route();
  } catch (error) {
    if (/** @type {any} */ (error).status === 0) setTimeout(startAgain, 2000);
  }
}

async function renew() {
  if (!app.session || !app.session.csrf_token || app.signedOut) return;
  try {
    takeSession(await api.request("GET", "/session"));
  } catch {
    // The next request tells.
  }
}

start();
