"use strict";
// The table: rows of one operator or of one provider, sorted by any number.
(() => {
  const table = document.querySelector("#rows table");
  const body = table.tBodies[0];
  const rows = [...body.rows];
  const who = document.getElementById("pick-who");
  // heading -> what a row is sorted by
  const keys = { "µs": "us", "of floor": "share", "sluice is": "ratio", error: "distance" };
  const sorting = { key: null, down: false };

  function show() {
    const only = document.body.dataset.only || "all";
    for (const row of rows) {
      const provider = row.dataset.provider;
      const meant = who.value === "" || provider === "sluice" || provider === who.value;
      row.hidden = (only !== "all" && row.dataset.op !== only) || !meant;
    }
  }

  function sort() {
    const { key, down } = sorting;
    table.classList.toggle("sorted", key !== null);
    const value = (row) => (row.dataset[key] === undefined ? null : Number(row.dataset[key]));
    const order = key === null ? rows : [...rows].sort((a, b) => {
      const [x, y] = [value(a), value(b)];
      if (x === null || y === null) return (x === null) - (y === null);
      return down ? y - x : x - y;
    });
    body.append(...order);
  }

  for (const head of table.tHead.rows[0].cells) {
    const key = keys[head.textContent];
    if (!key) continue;
    const button = document.createElement("button");
    button.type = "button";
    button.title = "sort: up, down, as it was";
    button.append(head.textContent);
    head.dataset.name = head.textContent;
    head.replaceChildren(button);
    button.addEventListener("click", () => {
      const again = sorting.key === key;
      if (again && sorting.down) sorting.key = null;
      else [sorting.key, sorting.down] = [key, again];
      for (const cell of table.tHead.rows[0].cells) cell.removeAttribute("aria-sort");
      if (sorting.key) head.setAttribute("aria-sort", sorting.down ? "descending" : "ascending");
      sort();
    });
  }

  const names = [...new Set(rows.map((row) => row.dataset.provider))].filter((n) => n && n !== "sluice");
  for (const [value, text] of [["", "every provider"], ...names.map((n) => [n, `sluice and ${n}`])]) {
    const option = document.createElement("option");
    [option.value, option.textContent] = [value, text];
    who.append(option);
  }
  who.hidden = names.length < 2;
  who.addEventListener("change", show);
  document.addEventListener("only", show);
  show();
})();
