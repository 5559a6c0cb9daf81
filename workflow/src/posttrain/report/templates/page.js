// Shows the numbers under the pointer, and opens what is folded when the page is printed. The page is complete without it.
"use strict";
(() => {
  const svgNamespace = "http://www.w3.org/2000/svg";

  function nearest(steps, wanted) {
    let low = 0, high = steps.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (steps[middle] < wanted) low = middle; else high = middle;
    }
    return wanted - steps[low] <= steps[high] - wanted ? low : high;
  }

  function show(value) {
    const isSmall = value !== 0 && Math.abs(value) < 1e-3;
    return isSmall ? value.toExponential(3) : value.toLocaleString("en-US", {maximumSignificantDigits: 5});
  }

  function addCell(tip, tag, text, className) {
    const cell = document.createElement(tag);
    cell.textContent = text;
    if (className) cell.className = className;
    tip.append(cell);
    return cell;
  }

  function fill(tip, data, step) {
    tip.replaceChildren();
    addCell(tip, "div", data.x + " " + step.toLocaleString("en-US"), "muted");
    for (const line of [...data.series].reverse()) {
      const index = nearest(line.steps, step);
      if (line.steps[index] !== step) continue;
      const row = addCell(tip, "div", "");
      addCell(row, "span", "● ", "c" + line.color);
      row.append(line.label + " ");
      addCell(row, "b", show(line.values[index]));
    }
  }

  for (const svg of document.querySelectorAll("svg.chart")) {
    const data = JSON.parse(svg.dataset.values);
    const along = data.log ? Math.log : step => step;
    const [left, top, right, bottom] = data.box, [first, last] = data.range.map(along);
    const steps = data.series.map(line => line.steps).reduce((a, b) => (a.length >= b.length ? a : b));
    const figure = svg.closest("figure"), tip = document.createElement("div"), cursor = document.createElementNS(svgNamespace, "line");
    tip.className = "tip"; tip.hidden = true; figure.append(tip);
    cursor.setAttribute("class", "cursor"); cursor.setAttribute("y1", top); cursor.setAttribute("y2", bottom);
    const hide = () => { tip.hidden = true; cursor.remove(); };
    svg.addEventListener("pointerleave", hide);
    svg.addEventListener("pointermove", event => {
      const frame = svg.getBoundingClientRect(), scale = frame.width / svg.viewBox.baseVal.width;
      const x = (event.clientX - frame.left) / scale;
      if (x < left - 8 || x > right + 8) return hide();
      const step = steps[nearest(steps.map(along), first + (x - left) / (right - left) * (last - first))];
      const at = last > first ? left + (along(step) - first) / (last - first) * (right - left) : (left + right) / 2;
      cursor.setAttribute("x1", at); cursor.setAttribute("x2", at); svg.append(cursor);
      fill(tip, data, step);
      tip.hidden = false;
      const outer = figure.getBoundingClientRect(), place = frame.left - outer.left + at * scale;
      const fits = place + 12 + tip.offsetWidth < outer.width;
      tip.style.left = Math.max(4, fits ? place + 12 : place - 12 - tip.offsetWidth) + "px";
      tip.style.top = frame.top - outer.top + top * scale + 4 + "px";
    });
  }

  addEventListener("beforeprint", () => {
    for (const folded of document.querySelectorAll("details")) folded.open = true;
  });
})();
