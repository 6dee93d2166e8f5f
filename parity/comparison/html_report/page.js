// Sort a table by the column whose header is clicked; a second click reverses the order.  Numbers start with the
// largest and are sorted by all of their digits, which are in the data-v of their cells; empty cells stay last.
for (const button of document.querySelectorAll("th button")) {
  button.addEventListener("click", () => {
    const header = button.closest("th");
    const body = header.closest("table").tBodies[0];
    const key = (row) => row.cells[header.cellIndex];
    const numbers = "v" in key(body.rows[0]).dataset;
    const sorted = header.getAttribute("aria-sort");
    const up = numbers ? sorted === "descending" : sorted !== "ascending";
    const compare = (a, b) => {
      const [x, y] = [key(a), key(b)];
      if (!numbers) return (up ? 1 : -1) * x.textContent.localeCompare(y.textContent, "en", { numeric: true });
      if (!x.dataset.v || !y.dataset.v) return !x.dataset.v - !y.dataset.v;
      const [p, q] = [Number(x.dataset.v), Number(y.dataset.v)];
      return p === q ? 0 : (up ? 1 : -1) * (p < q ? -1 : 1);
    };
    for (const other of header.parentElement.cells) other.removeAttribute("aria-sort");
    header.setAttribute("aria-sort", up ? "ascending" : "descending");
    body.append(...[...body.rows].sort(compare));
  });
}
