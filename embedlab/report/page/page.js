"use strict";
const root = document.documentElement;
const button = document.getElementById("theme");
const dark = matchMedia("(prefers-color-scheme: dark)");
const isDark = () => (root.dataset.theme || (dark.matches ? "dark" : "light")) === "dark";
const name = () => { button.textContent = isDark() ? "Light" : "Dark"; };
button.hidden = false;
button.addEventListener("click", () => { root.dataset.theme = isDark() ? "light" : "dark"; name(); });
dark.addEventListener("change", name);
name();

const table = document.getElementById("table");
const body = table.tBodies[0];
const heads = [...table.tHead.rows[0].cells];
heads.forEach((head, column) => {
  const sort = document.createElement("button");
  sort.type = "button";
  sort.textContent = head.textContent;
  head.replaceChildren(sort);
  sort.addEventListener("click", () => {
    const down = head.ariaSort !== "descending";
    heads.forEach((other) => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const order = (a, b) => {
      const [x, y] = [a.cells[column], b.cells[column]];
      const [p, q] = [x.dataset.v, y.dataset.v];
      if ((p === "") !== (q === "")) return p === "" ? 1 : -1; // what has no number comes last either way
      const rise = p === "" ? x.textContent.localeCompare(y.textContent) : p - q;
      return down ? -rise : rise;
    };
    body.append(...[...body.rows].sort(order));
  });
});

const filter = document.getElementById("filter");
document.getElementById("search").hidden = false;
filter.addEventListener("input", () => {
  const words = filter.value.toLowerCase().split(/\s+/);
  let shown = 0;
  for (const row of body.rows) {
    const text = row.textContent.toLowerCase();
    row.hidden = !words.every((word) => text.includes(word));
    shown += !row.hidden;
  }
  document.getElementById("count").textContent = filter.value ? `${shown} of ${body.rows.length}` : "";
});

addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((part) => { part.open = true; }));
