// What the server answers, as the page understands it (docs/viewer.md tells the same in words).

import type { HarvestSummary } from "./harvests.ts";

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
  ended_by?: string;
  ranks?: number;
  tags?: string[];
  note?: string;
}

/** What the list of runs says of one, once it was asked for. */
export interface Card {
  ended_by: string;
  metrics: Record<string, MetricSummary>;
  nonfinite: number | null; // the first step
  counts: Record<string, number>;
  headline: string;
  running: boolean;
}

export interface MetricSummary {
  last: number | null;
  min: number | null;
  bad: number | null;
  line: (number | null)[];
  steps: number;
}

export interface Runs {
  folder: string;
  runs: RunSummary[];
  harvests?: HarvestSummary[];
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
  ended_by?: string; // the error that ended the watched code
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

/** Findings of one rule put together: the first of them, with the places and steps of all. */
export interface FindingGroup extends Omit<Finding, "steps"> {
  steps: { first: number; last: number } | null;
  code: string;
  places: string[];
  place_count: number;
  consequences: FindingGroup[];
}

export interface TimelineMark {
  step: number;
  kind: string;
  text: string;
  code: string;
  rank: number;
}

export interface TimelineAnswer {
  rate: { steps: number[]; values: number[] };
  marks: TimelineMark[];
  hidden: number;
  phases: { phase: string; from: number; to: number }[];
}

export interface Findings {
  counts: Record<string, number>;
  findings: Finding[];
  groups?: FindingGroup[]; // by cause, the earliest of the worst first
  headline?: string; // what went wrong, in a sentence
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
  explanation?: string;
  every?: number; // of how many steps a column of the heat map is the worst
  heat: { sites: string[]; steps: number[]; value: (number | null)[][] };
}

export interface Event {
  version: string | number;
  state: State;
  steps: number | { count: number; first: number | null; last: number | null };
}
