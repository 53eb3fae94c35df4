// Modules as a tree over the rows of a heat map: which of them are collapsed into one row each.

import type { SiteInfo } from "./types.ts";

export interface Shape {
  level: number; // modules this deep are collapsed; Infinity: none
  open: ReadonlySet<string>;
  shut: ReadonlySet<string>;
}

export interface Branch {
  module: string;
  folded: boolean;
  count: number;
}

export class Tree {
  private readonly counts = new Map<string, number>();
  readonly deepest: number;

  constructor(private readonly sites: readonly SiteInfo[]) {
    let deepest = 0;
    for (const { path } of sites)
      modulesOf(path).forEach((module, depth) => {
        this.counts.set(module, (this.counts.get(module) ?? 0) + 1);
        if (depth) deepest = Math.max(deepest, depth);
      });
    this.deepest = deepest;
  }

  /** The collapsed module that a path lies in, or null. */
  folded(path: string, shape: Shape): string | null {
    const found = modulesOf(path).find((module, depth) => {
      if ((this.counts.get(module) ?? 0) < 2) return false;
      return shape.shut.has(module) || (depth + 1 >= shape.level && !shape.open.has(module));
    });
    return found ?? null;
  }

  /** The modules that are collapsed, for a request. */
  folds(shape: Shape): string[] {
    return [...new Set(this.sites.map(({ path }) => this.folded(path, shape)).filter((one) => one !== null))];
  }

  rows(shape: Shape): number {
    return new Set(this.sites.map(({ path }, i) => this.folded(path, shape) ?? i)).size;
  }

  /** The deepest level at which every row has room for its name. */
  fitting(room: number): number {
    if (this.sites.length <= room) return Infinity;
    const rows = (level: number) => this.rows({ level, open: new Set(), shut: new Set() });
    let level = 1;
    while (level <= this.deepest && rows(level + 1) <= room) level++;
    while (level <= this.deepest && rows(level) < 4) level++;
    return level;
  }

  /** What a row belongs to: the collapsed module it is, or the innermost one it lies in. */
  branch(path: string, shape: Shape): Branch | null {
    const folded = this.folded(path, shape);
    const module = folded ?? modulesOf(path).reverse().find((one) => one !== path && (this.counts.get(one) ?? 0) > 1);
    return module === undefined ? null : { module, folded: folded !== null, count: this.counts.get(module) ?? 0 };
  }
}

/** `a.b/c` lies in `a`, `a.b` and `a.b/c`. */
export function modulesOf(path: string): string[] {
  const ends = [...path.matchAll(/[./]/g)].map((found) => found.index);
  return path ? [...ends, path.length].map((end) => path.slice(0, end)) : [];
}

/** Names in an address. */
export function listed(text: string | undefined): Set<string> {
  return new Set((text ?? "").split("|").filter(Boolean));
}

export function joined(names: Iterable<string>): string {
  return [...names].join("|");
}
