document.querySelectorAll("table.sortable").forEach(table => {
  const headings = [...table.tHead.rows[0].cells], body = table.tBodies[0];
  headings.forEach((heading, column) => heading.firstChild.addEventListener("click", () => {
    const sign = heading.ariaSort === "descending" ? 1 : -1;
    const text = row => row.cells[column].textContent.trim();
    const compare = (a, b) => {
      const [x, y] = [parseFloat(text(a).replaceAll(",", "")), parseFloat(text(b).replaceAll(",", ""))];
      if (column && (isNaN(x) || isNaN(y))) return isNaN(x) - isNaN(y);
      return column ? sign * (x - y) : -sign * text(a).localeCompare(text(b));
    };
    [...body.rows].sort(compare).forEach(row => body.append(row));
    headings.forEach(other => other.ariaSort = other === heading ? (sign < 0 ? "descending" : "ascending") : "none");
  }));
});
