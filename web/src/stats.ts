// The statistics a heat map can show, in words: the server's registry names them.

let labels: Readonly<Record<string, string>> = {};

export function learn(known: Readonly<Record<string, string>> | undefined): void {
  labels = known ?? {};
}

export function nameOf(stat: string): string {
  return labels[stat] ?? stat;
}

/** The one before or after in a list, round and round. */
export function beside(list: readonly string[], now: string, by: number): string {
  const at = list.indexOf(now);
  return list[(at + by + list.length) % list.length] ?? now;
}
