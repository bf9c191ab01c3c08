// @ts-check
// uPlot's distribution for browsers is a classic script that defines a global: its module is three times as large.

/** @returns {Promise<any>} the constructor of a plot */
export function load() {
  return new Promise((resolve, reject) => {
    const script = document.createElement("script");
    script.onload = () => resolve(/** @type {any} */ (window).uPlot);
    script.onerror = () => reject(new Error("uPlot could not be loaded"));
    // A script's URL is a sink of Trusted Types: this policy lets exactly one file pass.
    const file = new URL("./vendor/uplot/uPlot.iife.min.js", import.meta.url).href;
    const types = /** @type {any} */ (window).trustedTypes;
    const policy = types && types.createPolicy("uplot", {
      createScriptURL: (/** @type {string} */ text) => {
        if (text !== file) throw new TypeError("only uPlot is loaded this way");
        return text;
      },
    });
    script.src = policy ? policy.createScriptURL(file) : file;
    document.head.append(script);
  });
}
