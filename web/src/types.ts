// What the server answers, as the page understands it (docs/viewer.md tells the same in words).

export type State = "live" | "finished" | "crashed" | "empty" | "unreadable";

export interface RunSummary {
  id: string;
  state: State;
  started?: string | number | null;
  steps: number;
  first?: number | null;
  last?: number | null;
  sites: number;
  records: number;
  model?: string | null;
  error?: string | null;
}

export interface Runs {
  folder: string;
  runs: RunSummary[];
}

/** An entry of the registry of ports (src/tensortap/select/ports.py). */
export interface PortInfo {
  name: string;
  label: string;
  gradient: boolean;
  beside: string[];
}

export interface SiteInfo {
  i: number;
  site: string;
  path: string;
  port: string;
  slot: string;
  op: string;
  calls: number;
  dtype: string;
  shape: string | number[] | null;
  type: string;
  histogram: boolean;
  tensors: number;
}

export type Counts = Record<string, unknown>;

export interface RunInfo {
  id: string;
  path: string;
  state: State;
  version: string | number;
  steps: { count: number; first: number | null; last: number | null }; // of the phase shown
  phase: string; // "": all
  phases: string[];
  ranks: number[];
  sites: SiteInfo[];
  metrics: string[];
  stats: string[];
  ports: PortInfo[];
  labels?: Record<string, string>;
  model?: string; // its class
  counts: Counts;
  unseen: Counts;
  cost: Counts | null;
  probes: unknown[];
  about: Counts;
  error?: string | null;
}

export interface Finding {
  rule: string;
  severity: "info" | "warning" | "error";
  site: string;
  steps: { first: number; last: number; count: number } | null;
  evidence: Record<string, unknown>;
  message: string;
  advice: string;
}

export interface Findings {
  counts: Record<string, number>;
  findings: Finding[];
  rules: string[];
  skipped: Record<string, string>;
  running?: boolean;
  error?: string;
  steps?: { looked: number; of: number }; // fewer than all in a very long run
}

export interface CostSite {
  site: string;
  seconds: number;
  share: number;
}

export interface Cost {
  seconds: number | null;
  share: number | null;
  sites: CostSite[];
  thinned: Counts;
  unseen: Counts;
}

export interface KeptTensor {
  step: number;
  call: number;
  rank?: number;
  probe?: number;
  keeper: string;
  dtype: string;
  shape: number[];
}

export interface DiffAnswer {
  a: string;
  b: string;
  same: boolean;
  first: { site: string; step: number; [key: string]: unknown } | null;
  first_unequal: { site: string; step: number; [key: string]: unknown } | null;
  aligned_by: string;
  sites: number;
  differing: number;
  pairs: number;
  only_in_a: string[];
  only_in_b: string[];
  steps: number[];
  steps_only_in_a: number[];
  steps_only_in_b: number[];
  rows: Record<string, unknown>[];
  headline?: string;
  remarks?: string[];
  every?: number; // more than 1: steps were left out
  heat: { sites: string[]; steps: number[]; value: (number | null)[][] };
}

export interface Event {
  version: string | number;
  state: State;
  steps: number | { count: number; first: number | null; last: number | null };
}
