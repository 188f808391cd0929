// Every picture at the block and channel that are chosen, at every scale.

const SMALL = 256; // of a canvas, in pixels

function showGallery(of) {
  const block = of.blocks[seen.block];
  const slot = $("#gallery");
  const what = of.images.map((i) => [i.label, i.guess, i.image.length]);
  keep(slot, [seen.of, block.scales, what], () => of.images.map((one) => entry(one, block.scales)));
  $$("figure", slot).forEach((figure, i) => {
    const { maps } = of.images[i];
    const scales = maps[seen.block][seen.view];
    $$("canvas", figure).forEach((canvas, k) => overlaid(canvas, of.images[i], scales[k], SMALL));
  });
}

/** A picture, what it is and was taken for, and places for its overlays. */
function entry(image, scales) {
  const cell = (inside, text) => h("div", {}, inside, h("span", {}, text));
  return h(
    "figure",
    {},
    h("figcaption", {}, judged(image)),
    h(
      "div",
      { class: "strip" },
      cell(h("img", { src: image.image, alt: "" }), "picture"),
      ...[0, ...scales].map((k) => cell(h("canvas", { "aria-hidden": "true" }), grids(k))),
    ),
  );
}
