// Every text that stands out from its ground by less than 4.5 to 1.
() => {
  const paint = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgb = (text) => {
    paint.clearRect(0, 0, 1, 1);
    paint.fillStyle = text;
    paint.fillRect(0, 0, 1, 1);
    return [...paint.getImageData(0, 0, 1, 1).data];
  };
  const linear = (value) => (value <= 0.03928 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
  const light = ([red, green, blue]) => 0.2126 * linear(red / 255) + 0.7152 * linear(green / 255) + 0.0722 * linear(blue / 255);
  const ground = (node) => {
    for (let at = node; at; at = at.parentElement) {
      const found = rgb(getComputedStyle(at).backgroundColor);
      if (found[3] === 255) return found;
    }
    return [255, 255, 255, 255];
  };
  const bad = [];
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const text = walk.currentNode.data.trim();
    const node = walk.currentNode.parentElement;
    if (!text || !node.checkVisibility() || node.closest(".unseen, :disabled, noscript, script, title")) continue;
    const style = getComputedStyle(node);
    const ink = light(rgb(node.namespaceURI.endsWith("svg") ? style.fill : style.color));
    const paper = light(ground(node));
    const ratio = (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05);
    if (ratio < 4.5) bad.push(`${node.getAttribute("class")} ${text.slice(0, 30)}: ${ratio.toFixed(2)}`);
  }
  return bad;
}
