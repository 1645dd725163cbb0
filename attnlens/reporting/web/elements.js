// @ts-check
// Elements of the page. Text enters as text alone, so that a token is never markup.

/**
 * @param {string} id
 * @returns {HTMLElement}
 */
export const at = (id) => /** @type {HTMLElement} */ (document.getElementById(id));

/**
 * @param {string} tag
 * @param {Record<string, string | number>} [attributes]
 * @param {(Node | string)[]} children
 * @returns {HTMLElement}
 */
export function html(tag, attributes = {}, ...children) {
  return /** @type {HTMLElement} */ (filled(document.createElement(tag), attributes, children));
}

/**
 * @param {string} tag
 * @param {Record<string, string | number>} [attributes]
 * @param {(Node | string)[]} children
 * @returns {SVGElement}
 */
export function svg(tag, attributes = {}, ...children) {
  return /** @type {SVGElement} */ (filled(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children));
}

/**
 * @param {Element} element
 * @param {Record<string, string | number>} attributes
 * @param {(Node | string)[]} children
 */
function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, String(value));
  element.append(...children);
  return element;
}

/**
 * A picture of so many pixels, painted.
 * @param {number} width
 * @param {number} height
 * @param {(context: CanvasRenderingContext2D) => void} painter
 */
export function canvas(width, height, painter) {
  const element = /** @type {HTMLCanvasElement} */ (html("canvas", { width, height }));
  painter(/** @type {CanvasRenderingContext2D} */ (element.getContext("2d")));
  return element;
}

/** @param {string} variable of the style sheet */
export const themed = (variable) => getComputedStyle(document.documentElement).getPropertyValue(variable).trim();

/**
 * Give a list its options.
 * @param {HTMLSelectElement} select
 * @param {[string | number, string][]} entries values and texts
 */
export function offer(select, entries) {
  select.replaceChildren(...entries.map(([value, text]) => html("option", { value }, text)));
}
