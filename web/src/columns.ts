// The binary answer: a JSON header, then columns that are typed arrays over the very bytes received.

export type Numbers = Float32Array | Float64Array | Int32Array | Uint8Array | Uint32Array;

interface Described {
  name: string;
  dtype: "f4" | "f8" | "i4" | "u1" | "u4";
  shape: number[];
  offset: number;
}

export interface Column {
  values: Numbers;
  shape: number[];
}

const ARRAYS = { f4: Float32Array, f8: Float64Array, i4: Int32Array, u1: Uint8Array, u4: Uint32Array };

export class Columns {
  constructor(
    readonly header: Record<string, unknown>,
    private readonly columns: Map<string, Column>,
  ) {}

  static decode(bytes: ArrayBuffer): Columns {
    const length = new DataView(bytes).getUint32(0, true);
    const header = JSON.parse(new TextDecoder().decode(new Uint8Array(bytes, 4, length))) as { columns: Described[] };
    const start = 4 + length;
    const columns = header.columns.map((told): [string, Column] => {
      const count = told.shape.reduce((a, b) => a * b, 1);
      return [told.name, { values: new ARRAYS[told.dtype](bytes, start + told.offset, count), shape: told.shape }];
    });
    return new Columns(header as unknown as Record<string, unknown>, new Map(columns));
  }

  has(name: string): boolean {
    return this.columns.has(name);
  }

  names(): string[] {
    return [...this.columns.keys()];
  }

  column(name: string): Column {
    const found = this.columns.get(name);
    if (!found) throw new Error(`the answer has no column ${name}; it has ${this.names().join(", ")}`);
    return found;
  }

  get(name: string): Numbers {
    return this.column(name).values;
  }

  find(name: string): Numbers | null {
    return this.columns.get(name)?.values ?? null;
  }

  /** The same answer with some columns and header fields put in place of the old ones. */
  with(columns: Record<string, Column>, header: Record<string, unknown> = {}): Columns {
    return new Columns({ ...this.header, ...header }, new Map([...this.columns, ...Object.entries(columns)]));
  }
}
