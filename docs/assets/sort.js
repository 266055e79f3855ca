// Sorts a table by the column of the clicked heading, by number if every cell begins with a number.
document.addEventListener("click", event => {
  const head = event.target.closest(".md-typeset table th")
  if (!head) return
  const body = head.closest("table").tBodies[0], place = head.cellIndex
  const text = row => row.cells[place].textContent.trim()
  const number = row => parseFloat(text(row).replaceAll(",", ""))
  const rows = [...body.rows], sign = head.ariaSort === "ascending" ? -1 : 1
  const isNumeric = rows.every(row => !Number.isNaN(number(row)))
  rows.sort((a, b) => sign * (isNumeric ? number(a) - number(b) : text(a).localeCompare(text(b))))
  for (const other of head.parentElement.cells) other.ariaSort = null
  head.ariaSort = sign === 1 ? "ascending" : "descending"
  body.append(...rows)
})
