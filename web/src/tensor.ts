// A tensor that was kept: a matrix as an image one can zoom into, feature maps and attention as a grid of images, samples as values.

import type { Columns } from "./columns.ts";
import { fill, h, select } from "./dom.ts";
import { count, number, shape } from "./format.ts";
import { Picture } from "./picture.ts";
import { empty, failed, loading } from "./states.ts";
import { type Rows, Table } from "./table.ts";
import type { KeptTensor } from "./types.ts";
import type { Context } from "./view.ts";

const MAPS = 64;
const TABLED = 16; // columns

export class TensorView {
  readonly element = h("section", { class: "panel tensor" });
  private readonly body = h("div", { class: "tensor" });
  private readonly picture = new Picture();
  private readonly table = new Table("the values", () => this.rows());
  private data: Columns | null = null;
  private shown = "";
  private kept: KeptTensor[] = [];

  constructor(
    private readonly context: Context,
    private readonly site: string,
  ) {}

  /** `which` is `step,call,keeper,rank,probe` and `at` the index of the leading axes, as the address has them. */
  show(kept: KeptTensor[], which: string | undefined, at: string | undefined): void {
    this.kept = kept;
    const title = h("h2", {}, "Tensors kept");
    if (!kept.length) {
      this.shown = "";
      return fill(
        this.element,
        title,
        empty("None of this site", "Keep whole tensors, samples or rows: tt.probe(…, keep=[tt.stats(), tt.full()])."),
      );
    }
    const index = at ? at.split(",") : [];
    const chosen = kept.find((one) => key(one) === which) ?? kept[kept.length - 1]!;
    fill(this.element, title, this.chooser(chosen), this.body);
    const name = `${key(chosen)} ${index.join(",")}`;
    if (name !== this.shown) void this.load(chosen, index.map(Number), name);
  }

  repaint(): void {
    if (this.data && this.picture.element.isConnected) this.picture.repaint();
  }

  close(): void {
    this.shown = "";
  }

  private chooser(chosen: KeptTensor): HTMLElement {
    const options = this.kept.map(
      (one) =>
        [
          key(one),
          `step ${count(one.step)}${one.call ? `, call ${one.call}` : ""}: ${one.keeper} ${shape(one.shape)}`,
        ] as const,
    );
    const pick = select("Kept tensor", options.slice(-2000), key(chosen), (to) =>
      this.context.router.set({ tensor: to, index: null }),
    );
    return h(
      "div",
      { class: "tools" },
      pick,
      h("span", { class: "quiet" }, `${chosen.dtype}, ${this.kept.length} kept`),
    );
  }

  private async load(chosen: KeptTensor, index: number[], name: string): Promise<void> {
    this.shown = name;
    fill(this.body, loading("the tensor"));
    try {
      this.data = await this.ask(chosen, index);
      if (this.shown !== name) return;
      const maps = Number(this.data.header["maps"] ?? 0);
      if (maps > 1 && !index.length) await this.grid(chosen, maps, name);
      else this.one(chosen, index);
    } catch (error) {
      if (this.shown === name) fill(this.body, failed(error));
    }
  }

  private ask(chosen: KeptTensor, index: number[], part: { x?: string; y?: string } = {}): Promise<Columns> {
    const { step, call, keeper, rank, probe } = chosen;
    return this.context.source.columns("/api/tensor", {
      run: this.context.run.id,
      site: this.site,
      step,
      call,
      keeper,
      rank,
      probe,
      index: index.join(","),
      ...part,
    });
  }

  private one(chosen: KeptTensor, index: number[]): void {
    const { data } = this;
    const leading = Math.max(0, chosen.shape.length - 2);
    const pickers = Array.from({ length: leading }, (_, axis) => this.axis(chosen, index, axis));
    const back =
      index.length && Number(data!.header["maps"] ?? 0) > 1
        ? h("button", { type: "button", class: "small", onclick: () => this.set(chosen, []) }, "All maps")
        : null;
    fill(this.body, h("div", { class: "tools" }, back, pickers), this.picture.element, this.table.element);
    this.picture.show(data!, (x, y) => this.ask(chosen, index, { x, y }));
    this.table.refresh();
  }

  private axis(chosen: KeptTensor, index: number[], axis: number): HTMLElement {
    const size = chosen.shape[axis] ?? 1;
    const input = h("input", {
      type: "number",
      min: 0,
      max: size - 1,
      value: index[axis] ?? 0,
      "aria-label": `Index of axis ${axis}`,
      style: "width: 80px",
    });
    input.addEventListener("change", () => {
      const next = Array.from({ length: Math.max(0, chosen.shape.length - 2) }, (_, i) =>
        i === axis ? Math.min(size - 1, Math.max(0, Number(input.value))) : (index[i] ?? 0),
      );
      this.set(chosen, next);
    });
    return h("label", {}, `axis ${axis} of ${count(size)}`, input);
  }

  /** Feature maps or attention heads of the first sample, side by side on one scale. */
  private async grid(chosen: KeptTensor, maps: number, name: string): Promise<void> {
    const lead = chosen.shape.length - 3;
    const indices = Array.from({ length: Math.min(maps, MAPS) }, (_, map) => [...Array<number>(lead).fill(0), map]);
    const answers = await Promise.all(indices.map((index) => this.ask(chosen, index)));
    if (this.shown !== name) return;
    const reach = Math.max(...answers.map((one) => Picture.reach(one)));
    const figures = answers.map((one, map) => {
      const canvas = Picture.small(one, reach, 72);
      canvas.addEventListener("click", () => this.set(chosen, indices[map]!));
      return h("figure", {}, canvas, h("figcaption", {}, String(map)));
    });
    const more = maps > MAPS ? ` of ${maps}` : "";
    const note = `${figures.length}${more} maps of sample 0, on one scale to ±${number(reach, 3)}; click one to read it.`;
    fill(
      this.body,
      h("p", { class: "quiet" }, note),
      h("div", { class: "maps" }, figures),
      Picture.key(reach),
      this.table.element,
    );
    this.table.refresh();
  }

  private set(chosen: KeptTensor, index: number[]): void {
    this.context.router.set({ tensor: key(chosen), index: index.join(",") });
  }

  private rows(): Rows {
    if (!this.data) return { head: [], rows: [] };
    const { values, shape: size } = this.data.column("value");
    const [high = 1, wide = 1] = size;
    if (high === 1) return { head: ["index", "value"], rows: Array.from(values, (value, i) => [i, value]) };
    const columns = Math.min(wide, TABLED);
    const rows = Array.from({ length: high }, (_, y) => [
      y,
      ...Array.from({ length: columns }, (_, x) => values[y * wide + x]!),
    ]);
    return { head: ["row", ...Array.from({ length: columns }, (_, x) => String(x))], rows };
  }
}

function key(kept: KeptTensor): string {
  return [kept.step, kept.call, kept.keeper, kept.rank ?? 0, kept.probe ?? 0].join(",");
}
