// Tables that a person can sort by any column and filter by words. Works on what is in the page; never fetches.
const tables = (() => {
  const { element } = words;

  function start() {
    for (const table of document.querySelectorAll("table.sortable")) makeSortable(table);
    for (const input of document.querySelectorAll("input[data-filters]")) {
      input.addEventListener("input", () => filter(input.dataset.filters));
    }
  }

  function makeSortable(table) {
    [...table.tHead.rows[0].cells].forEach((cell, column) => {
      const button = element("button", { type: "button", class: "sort" }, ...cell.childNodes);
      button.addEventListener("click", () => {
        const isUp = cell.getAttribute("aria-sort") !== "ascending";
        for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
        cell.setAttribute("aria-sort", isUp ? "ascending" : "descending");
        sort(table, column, isUp);
      });
      cell.append(button);
    });
  }

  /** Sort again by the column that the user chose, after cells have changed. */
  function again(table) {
    const cells = [...table.tHead.rows[0].cells];
    const column = cells.findIndex((cell) => cell.hasAttribute("aria-sort"));
    if (column >= 0) sort(table, column, cells[column].getAttribute("aria-sort") === "ascending");
  }

  /** Stable; what is unknown is last either way. */
  function sort(table, column, isUp) {
    const isNumber = table.tHead.rows[0].cells[column].classList.contains("number");
    const compare = new Intl.Collator("en", { numeric: true }).compare;
    const rows = [...table.tBodies[0].rows].map((row) => ({ row, key: keyOf(row.cells[column], isNumber) }));
    rows.sort((a, b) => {
      if (a.key === null || b.key === null) return (a.key === null) - (b.key === null);
      const isCount = typeof a.key === "number" && typeof b.key === "number";
      const order = isCount ? a.key - b.key : compare(String(a.key), String(b.key));
      return isUp ? order : -order;
    });
    table.tBodies[0].append(...rows.map(({ row }) => row));
  }

  function keyOf(cell, isNumber) {
    const text = cell.dataset.sort ?? cell.textContent.trim();
    if (text === "" || text === "–" || text === "…") return null;
    if (!isNumber) return text;
    const number = Number(text.replaceAll(",", ""));
    return Number.isNaN(number) ? text : number; // such as 1 × 64
  }

  /** Show the rows that have every word. */
  function filter(id) {
    const table = document.getElementById(id);
    const wanted = document.querySelector(`input[data-filters="${id}"]`).value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const row of table.tBodies[0].rows) {
      const text = row.textContent.toLowerCase();
      row.hidden = !wanted.every((word) => text.includes(word));
      shown += row.hidden ? 0 : 1;
    }
    const all = table.tBodies[0].rows.length;
    document.querySelector(`output[data-counts="${id}"]`).textContent = shown === all ? `${all} rows` : `${shown} of ${all} rows`;
  }

  return { start, again, filter };
})();
