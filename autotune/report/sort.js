for (const button of document.querySelectorAll("table.sortable > thead th button")) {
  button.addEventListener("click", () => {
    const head = button.closest("th"), table = head.closest("table");
    const up = head.getAttribute("aria-sort") !== "ascending";
    for (const other of head.parentNode.children) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
    // What moves: rows, or bodies of a row and what is below it.
    const grouped = table.classList.contains("grouped");
    const parent = grouped ? table : table.tBodies[0], parts = [...(grouped ? table.tBodies : parent.rows)];
    const key = part => (grouped ? part.rows[0] : part).children[head.cellIndex].dataset.value ?? "";
    const absent = part => key(part) === "";
    const compare = (a, b) => key(a).localeCompare(key(b), "en", { numeric: false });
    const numeric = head.classList.contains("n");
    const order = (a, b) => absent(a) - absent(b) || (up ? 1 : -1) * (numeric ? key(a) - key(b) : compare(a, b));
    parent.append(...parts.sort(order));
  });
}
