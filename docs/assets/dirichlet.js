// Draws the clients' classes for a Dirichlet split, with a slider for alpha (numbers by docs/_ext/dirichlet.py).
const script = document.currentScript.src
document.addEventListener("DOMContentLoaded", async () => {
  const place = document.querySelector("#dirichlet")
  if (!place) return
  const splits = await (await fetch(new URL("dirichlet.json", script))).json()
  place.innerHTML = `<label>alpha <input type="range" max="${splits.length - 1}" value="3"> <output></output></label><div></div>`
  const [slider, value, bars] = ["input", "output", "div"].map(name => place.querySelector(name))
  const draw = () => {
    const {alpha, counts} = splits[slider.value]
    const sum = numbers => numbers.reduce((total, number) => total + number, 0)
    const most = Math.max(...counts.map(sum))
    value.textContent = alpha
    slider.ariaValueText = alpha
    bars.innerHTML = counts.map((numbers, client) => `<p><span>client ${client}</span><span role="img" aria-label="${numbers.join(", ")} examples by class">${
      numbers.map((number, label) => `<i class="c${label}" style="width:${100 * number / most}%" title="class ${label}: ${number} examples"></i>`).join("")
    }</span><span>${sum(numbers)}</span></p>`).join("")
  }
  slider.addEventListener("input", draw)
  draw()
})
