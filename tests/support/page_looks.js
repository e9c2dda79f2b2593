// Expression for tests/support/page_looks.py: what is wrong with how the page looks.
(() => {
  // Elements that are wider than the window and not inside of something that scrolls by itself.
  function tooWide() {
    const scrolls = (element) => element && (/auto|scroll|hidden|clip/.test(getComputedStyle(element).overflowX) || scrolls(element.parentElement));
    return [...document.body.querySelectorAll("*")]
      .filter((element) => element.getClientRects().length && element.getBoundingClientRect().right > innerWidth + 1)
      .filter((element) => !scrolls(element.parentElement) && getComputedStyle(element).position !== "fixed")
      .map((element) => `${element.tagName}.${element.className}: ${Math.round(element.getBoundingClientRect().right)}`);
  }

  // Text with less contrast than WCAG 2 AA wants: 4.5, and 3 for large text. Images below text are not considered.
  function unreadable() {
    const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
    const rgba = (color) => { canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = color; canvas.fillRect(0, 0, 1, 1); return [...canvas.getImageData(0, 0, 1, 1).data]; };
    const over = (top, below) => [0, 1, 2].map((k) => top[k] * top[3] / 255 + below[k] * (1 - top[3] / 255));
    const ground = (element) => {
      if (!element) return rgba(matchMedia("(prefers-color-scheme: dark)").matches && getComputedStyle(document.documentElement).colorScheme.includes("dark") ? "#121212" : "#fff");
      const own = rgba(getComputedStyle(element).backgroundColor);
      return own[3] === 255 ? own : own[3] ? over(own, ground(element.parentElement)) : ground(element.parentElement);
    };
    const light = (color) => color.slice(0, 3).map((part) => part / 255).map((part) => part <= .04045 ? part / 12.92 : ((part + .055) / 1.055) ** 2.4)
      .reduce((sum, part, k) => sum + part * [.2126, .7152, .0722][k], 0);
    const found = [];
    for (const element of document.body.querySelectorAll("*")) {
      const words = [...element.childNodes].filter((node) => node.nodeType === 3).map((node) => node.textContent.trim()).join("");
      const style = getComputedStyle(element), size = parseFloat(style.fontSize);
      if (!words || !element.getClientRects().length || element.closest("svg, :disabled, option") || element.closest("[hidden]") || !element.checkVisibility({ opacityProperty: true, visibilityProperty: true })) continue;
      const below = ground(element), color = rgba(style.color);
      const both = [light(over(color, below)), light(below)];
      const contrast = (Math.max(...both) + .05) / (Math.min(...both) + .05);
      const needed = size >= 24 || (size >= 18.5 && style.fontWeight >= 700) ? 3 : 4.5;
      if (contrast < needed - .01) found.push(`${element.tagName}.${element.className} "${words.slice(0, 30)}": ${contrast.toFixed(2)}`);
    }
    return found;
  }

  const scrolled = document.documentElement.scrollWidth > innerWidth ? ["the page scrolls sideways"] : [];
  return [...scrolled, ...tooWide(), ...unreadable()];
})()
