// @ts-check
// The only way to the server: the public API, as any other client uses it. No request leaves this origin.

/** A problem document (RFC 9457), or the failure to reach the server (status 0). */
export class Problem extends Error {
  /** @param {any} document */
  constructor(document) {
    super(document.detail || document.title || "");
    this.status = /** @type {number} */ (document.status);
    this.type = String(document.type || "").split(":").pop() || "";
    this.title = String(document.title || "");
    /** @type {any} */
    this.document = document;
  }

  /** @param {string} field a dotted path @returns {string | undefined} what is wrong with it */
  of(field) {
    const found = (this.document.errors || []).find((/** @type {any} */ e) => e.field === field);
    return found && found.message;
  }
}

const state = {
  csrf: /** @type {string | null} */ (null),
  offline: false,
  /** @type {Set<() => void>} */
  listeners: new Set(),
  onSignedOut: () => {},
};

/** @param {string | null} token of the session, which every writing request carries */
export function setCsrf(token) {
  state.csrf = token;
}

/** @param {() => void} listener called when the server refuses the session */
export function whenSignedOut(listener) {
  state.onSignedOut = listener;
}

/** @returns {boolean} whether the server could not be reached last time */
export function isOffline() {
  return state.offline;
}

/** @param {() => void} listener called when that changes */
export function whenConnectionChanges(listener) {
  state.listeners.add(listener);
}

/** @param {boolean} offline */
function setOffline(offline) {
  if (state.offline === offline) return;
  state.offline = offline;
  for (const listener of state.listeners) listener();
}

/**
 * @param {string} path @param {Record<string, any>} [query] values that are empty are left out
 * @returns {string}
 */
export function url(path, query = {}) {
  const parts = new URLSearchParams();
  for (const [name, value] of Object.entries(query)) {
    if (value !== undefined && value !== null && value !== "") parts.set(name, String(value));
  }
  const text = parts.toString();
  return text ? `${path}?${text}` : path;
}

/**
 * Send a request and return the parsed body; throws Problem.
 * @param {string} method @param {string} path
 * @param {{json?: any, headers?: Record<string, string>, signal?: AbortSignal}} [options]
 * @returns {Promise<any>}
 */
export async function request(method, path, options = {}) {
  const response = await send(method, path, options);
  if (response.status === 204) return null;
  const type = response.headers.get("content-type") || "";
  return type.includes("json") ? response.json() : response.text();
}

/**
 * Send a request and return its response; throws Problem.
 * @param {string} method @param {string} path
 * @param {{json?: any, headers?: Record<string, string>, signal?: AbortSignal}} [options]
 * @returns {Promise<Response>}
 */
export async function send(method, path, options = {}) {
  const headers = { ...csrfHeader(method), ...options.headers };
  let body;
  if (options.json !== undefined) {
    headers["Content-Type"] = "application/json";
    body = JSON.stringify(options.json);
  }
  let response;
  try {
    response = await fetch(path, {
      method, headers, body, signal: options.signal, credentials: "same-origin", redirect: "error",
    });
  } catch (error) {
    if (options.signal && options.signal.aborted) throw error;
    setOffline(true);
    throw new Problem({ status: 0, type: "offline", title: "", detail: String(error) });
  }
  setOffline(false);
  if (!response.ok) throw await problemOf(response, options.headers);
  return response;
}

/** @param {string} method @returns {Record<string, string>} */
function csrfHeader(method) {
  return method === "GET" || !state.csrf ? {} : { "X-CSRF-Token": state.csrf };
}

/** @param {Response} response @param {Record<string, string>} [headers] @returns {Promise<Problem>} */
async function problemOf(response, headers = {}) {
  let document;
  try {
    document = await response.json();
  } catch {
    document = { title: response.statusText };
  }
  if (response.status === 401 && !headers.Authorization) state.onSignedOut();
  return new Problem({ ...document, status: response.status });
}

/**
 * Upload a form with its progress; `fetch` reports none.
 * @param {string} path @param {FormData} form @param {(share: number) => void} onProgress
 * @returns {{done: Promise<any>, abort: () => void}}
 */
export function upload(path, form, onProgress) {
  const xhr = new XMLHttpRequest();
  const done = new Promise((resolve, reject) => {
    xhr.open("POST", path);
    for (const [name, value] of Object.entries(csrfHeader("POST"))) xhr.setRequestHeader(name, value);
    xhr.upload.onprogress = (event) => {
      if (event.lengthComputable) onProgress(event.loaded / event.total);
    };
    xhr.onload = () => {
      let document = null;
      try {
        document = JSON.parse(xhr.responseText);
      } catch {
        document = { title: xhr.statusText };
      }
      setOffline(false);
      if (xhr.status === 401) state.onSignedOut();
      if (xhr.status < 300) resolve(document);
      else reject(new Problem({ ...document, status: xhr.status }));
    };
    xhr.onerror = () => {
      setOffline(true);
      reject(new Problem({ status: 0, type: "offline", title: "", detail: "" }));
    };
    xhr.send(form);
  });
  return { done, abort: () => xhr.abort() };
}

/**
 * The command that does the same, for a shell.
 * @param {string} method @param {string} path @param {any} [json]
 * @param {string[]} [forms] parts of a multipart form
 * @returns {string}
 */
export function curl(method, path, json, forms) {
  const words = ["curl"];
  if (method !== "GET") words.push("-X", method);
  words.push(quote(location.origin + path));
  if (state.csrf) words.push("-H", '"Authorization: Bearer $STILLHOUSE_API_KEY"');
  if (json !== undefined) {
    words.push("-H", quote("Content-Type: application/json"), "-d", quote(JSON.stringify(json)));
  }
  for (const part of forms || []) words.push("-F", quote(part));
  return words.join(" ");
}

/** @param {string} text @returns {string} */
function quote(text) {
  return `'${text.replaceAll("'", "'\\''")}'`;
}

/**
 * An event stream that survives the loss of its connection: it goes on after the last event that had an id.
 * (EventSource gives up for good at the first response that is no stream, such as the 503 of a restart.)
 */
export class Stream {
  /**
   * @param {string} path
   * @param {(type: string, data: any) => void} onEvent
   * @param {() => void} [onOpen] called whenever the stream is open again
   */
  constructor(path, onEvent, onOpen = () => {}) {
    this.path = path;
    this.onEvent = onEvent;
    this.onOpen = onOpen;
    this.lastId = "";
    this.isClosed = false;
    this.abort = new AbortController();
    this.run();
  }

  close() {
    this.isClosed = true;
    this.abort.abort();
  }

  async run() {
    let wait = 500;
    while (!this.isClosed) {
      try {
        /** @type {Record<string, string>} */
        const headers = { Accept: "text/event-stream" };
        if (this.lastId) headers["Last-Event-ID"] = this.lastId;
        const response = await send("GET", this.path, { headers, signal: this.abort.signal });
        wait = 500;
        this.onOpen();
        await this.read(response);
      } catch (error) {
        if (this.isClosed) return;
        if (!(error instanceof Problem)) setOffline(true);
        else if (error.status === 404) return;
      }
      if (this.isClosed) return;
      await pause(wait);
      wait = Math.min(wait * 2, 8000);
    }
  }

  /** @param {Response} response */
  async read(response) {
    const reader = /** @type {ReadableStream<Uint8Array>} */ (response.body).getReader();
    const decoder = new TextDecoder();
    let rest = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done || this.isClosed) return;
      rest += decoder.decode(value, { stream: true });
      const blocks = rest.split(/\r?\n\r?\n/);
      rest = blocks.pop() || "";
      for (const block of blocks) this.dispatch(block);
    }
  }

  /** @param {string} block the lines of one event */
  dispatch(block) {
    let type = "message";
    const data = [];
    for (const line of block.split(/\r?\n/)) {
      const colon = line.indexOf(":");
      const name = colon < 0 ? line : line.slice(0, colon);
      const value = colon < 0 ? "" : line.slice(colon + 1).replace(/^ /, "");
      if (name === "event") type = value;
      else if (name === "data") data.push(value);
      else if (name === "id") this.lastId = value;
    }
    if (data.length) this.onEvent(type, JSON.parse(data.join("\n")));
  }
}

/** @param {number} milliseconds ends early when the browser is online again */
function pause(milliseconds) {
  return new Promise((resolve) => {
    const timer = setTimeout(done, milliseconds);
    function done() {
      clearTimeout(timer);
      removeEventListener("online", done);
      resolve(null);
    }
    addEventListener("online", done);
  });
}
