// The statistics a heat map can show, in words.

export const STATS: Record<string, string> = {
  std: "standard deviation",
  mean: "mean",
  absmean: "|mean|",
  rms: "root mean square",
  l2: "L2 norm",
  min: "least",
  max: "greatest",
  zeros: "zeros (share)",
  nonfinite: "not finite (count)",
  numel: "elements",
  grad: "gradient norm",
  update: "update ratio ‖Δw‖/‖w‖",
};

export function nameOf(stat: string): string {
  return STATS[stat] ?? stat;
}

/** The one before or after in a list, round and round. */
export function beside(list: readonly string[], now: string, by: number): string {
  const at = list.indexOf(now);
  return list[(at + by + list.length) % list.length] ?? now;
}
