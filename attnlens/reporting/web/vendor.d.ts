/** What the page uses of the vendored libraries. */
type Scale = ((value: number) => number) & {
  domain(ends: number[]): Scale;
  range(ends: number[]): Scale;
  nice(): Scale;
  ticks(count?: number): number[];
  tickFormat(count?: number): (value: number) => string;
};
export function scaleLinear(): Scale;
export function line<Point>(): Line<Point>;
interface Line<Point> {
  (points: Point[]): string | null;
  x(place: (point: Point) => number): Line<Point>;
  y(place: (point: Point) => number): Line<Point>;
  defined(known: (point: Point) => boolean): Line<Point>;
}
export function interpolateCividis(place: number): string;
export function interpolateRgb(from: string, to: string): (place: number) => string;
export function piecewise(
  interpolate: typeof interpolateRgb, colours: string[],
): (place: number) => string;
export function csvFormatRows(rows: string[][]): string;
export function unzlibSync(bytes: Uint8Array): Uint8Array;
