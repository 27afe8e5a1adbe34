for (const button of document.querySelectorAll("table.sortable th button")) {
  button.addEventListener("click", () => {
    const head = button.closest("th"), body = head.closest("table").tBodies[0];
    const up = head.getAttribute("aria-sort") !== "ascending";
    for (const other of head.parentNode.children) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
    const key = row => row.children[head.cellIndex].dataset.value ?? "";
    const absent = row => key(row) === "";
    const compare = (a, b) => key(a).localeCompare(key(b), "en", { numeric: false });
    const numeric = head.classList.contains("n");
    const order = (a, b) => absent(a) - absent(b) || (up ? 1 : -1) * (numeric ? key(a) - key(b) : compare(a, b));
    body.append(...[...body.rows].sort(order));
  });
}
