// Bins of steps, by their edges: `edges[i]` up to, and without, `edges[i + 1]`. They need not be equally wide.

/** The bin that a step lies in, or -1. */
export function binOf(edges: ArrayLike<number>, step: number): number {
  let low = 0;
  let high = edges.length - 1;
  if (high < 1 || step < edges[0]! || step >= edges[high]!) return -1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (edges[middle]! <= step) low = middle;
    else high = middle;
  }
  return low;
}

/** The bin that a step lies in, or the nearest. */
export function nearestBin(edges: ArrayLike<number>, step: number): number {
  const last = Math.max(0, edges.length - 2);
  return step >= (edges[last] ?? 0) ? last : Math.max(0, binOf(edges, step));
}

/** The first step of the bin so many bins from the one at `step`. */
export function beside(edges: ArrayLike<number>, step: number, bins: number): number {
  const last = Math.max(0, edges.length - 2);
  return edges[Math.min(last, Math.max(0, nearestBin(edges, step) + bins))] ?? step;
}
