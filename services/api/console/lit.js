// @ts-check
// The template library, from one place: everything that becomes markup goes through `html` and `svg`, whose
// constant parts alone are parsed; every value is set as text or as a property.
export { html, svg, nothing, render } from "./vendor/lit-html/lit-html.js";
export { repeat } from "./vendor/lit-html/directives/repeat.js";
export { live } from "./vendor/lit-html/directives/live.js";
