// Measures the drawings of pages in frames, after all of them have loaded; the result goes into <pre> as JSON.
"use strict";
{
  const SLACK = 0.5;

  const overlap = (a, b) => a.left < b.right - SLACK && b.left < a.right - SLACK && a.top < b.bottom - SLACK && b.top < a.bottom - SLACK;
  const within = (a, b) => a.left >= b.left - SLACK && a.right <= b.right + SLACK && a.top >= b.top - SLACK && a.bottom <= b.bottom + SLACK;
  const holds = (box, x, y) => x > box.left + SLACK && x < box.right - SLACK && y > box.top + SLACK && y < box.bottom - SLACK;

  // Every text of a drawing that is shown: its words, its box, its element.
  function textsOf(drawing) {
    const found = [], walker = drawing.ownerDocument.createTreeWalker(drawing, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
      const node = walker.currentNode, range = drawing.ownerDocument.createRange();
      if (!node.data.trim() || node.parentElement.closest("title")) continue;
      range.selectNodeContents(node);
      const box = range.getBoundingClientRect();
      if (box.width && box.height) found.push({words: node.data.trim(), box, element: node.parentElement});
    }
    return found;
  }

  // Points along everything that is drawn as a line, at most 2 px apart on the screen.
  function pointsOf(line) {
    const matrix = line.getScreenCTM(), length = line.getTotalLength(), count = Math.ceil(length * matrix.a / 2);
    return Array.from({length: count + 1}, (_, index) => line.getPointAtLength(length * index / Math.max(1, count)).matrixTransform(matrix));
  }

  function fontSize(text) {
    const size = parseFloat(getComputedStyle(text.element).fontSize);
    return text.element.ownerSVGElement ? size * text.element.getScreenCTM().a : size;
  }

  function measureDrawing(drawing, problems) {
    const texts = textsOf(drawing), say = (what, ...words) => problems.push([what, ...words]);
    texts.forEach((text, index) => {
      for (const other of texts.slice(index + 1)) if (overlap(text.box, other.box)) say("two texts", text.words, other.words);
      const frame = text.element.closest("figure, .card, .scroll, details > div");
      const room = frame.getBoundingClientRect(), scrolls = frame.closest(".scroll") || frame.querySelector(".scroll");
      if (!scrolls && !within(text.box, room)) say("text outside of its card", text.words);
      const box = text.element.closest("g.node")?.querySelector(".box") ?? text.element.closest(".node, .cells i");
      if (box && !within(text.box, box.getBoundingClientRect())) say("text outside of its box", text.words);
      const svg = text.element.ownerSVGElement;
      if (svg && !within(text.box, svg.getBoundingClientRect())) say("text outside of its drawing", text.words);
      if (fontSize(text) < 10) say("small text", text.words, fontSize(text).toFixed(1));
    });
    for (const line of drawing.querySelectorAll("path, line"))
      for (const point of pointsOf(line))
        for (const text of texts)
          if (holds(text.box, point.x, point.y)) { say("line through text", text.words, line.getAttribute("class")); break; }
    for (const bar of drawing.querySelectorAll(".bar, .share"))
      for (const text of texts)
        if (overlap(bar.getBoundingClientRect(), text.box)) say("bar behind text", text.words);
    return texts.length;
  }

  function measurePage(frame) {
    const page = frame.contentDocument, problems = [];
    const height = page.documentElement.scrollHeight, hidden = page.documentElement.scrollWidth - page.documentElement.clientWidth;
    for (const folded of page.querySelectorAll("details")) folded.open = true;
    const drawings = [...page.querySelectorAll("svg, .drawing")];
    const texts = drawings.map(drawing => measureDrawing(drawing, problems));
    if (hidden > 0) problems.push(["the page is wider than the window", hidden]);
    const unique = [...new Set(problems.map(JSON.stringify))].map(JSON.parse);
    const dark = getComputedStyle(page.body).backgroundColor;
    return {height, drawings: drawings.length, texts: texts.reduce((a, b) => a + b, 0), background: dark, problems: unique};
  }

  addEventListener("load", () => {
    document.querySelector("pre").textContent = JSON.stringify([...document.querySelectorAll("iframe")].map(measurePage));
  });
}
