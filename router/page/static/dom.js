// Makes elements. Text is always set as text, never as HTML.

const SVG = "http://www.w3.org/2000/svg";

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

export const html = (tag, attributes = {}, ...children) => filled(document.createElement(tag), attributes, children);
export const svg = (tag, attributes = {}, ...children) =>
  filled(document.createElementNS(SVG, tag), attributes, children);

export const milliseconds = (seconds) =>
  seconds === null ? "–" : seconds < 0.0995 ? `${(seconds * 1000).toFixed(1)} ms` : seconds < 10
    ? `${Math.round(seconds * 1000)} ms` : `${seconds.toFixed(1)} s`;

export const short = (value) =>
  value === null ? "–" : value >= 1e6 ? `${(value / 1e6).toFixed(1)} M` : value >= 1e4
    ? `${(value / 1e3).toFixed(0)} k` : value >= 100 ? value.toFixed(0) : value.toFixed(1).replace(/\.0$/, "");
