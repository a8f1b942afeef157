// Times, differences and names as text.

const KINDS = [
  { key: "compute", words: "computes", height: 0.92 },
  { key: "communicate", words: "communicates", height: 0.82 },
  { key: "copy", words: "copies", height: 0.68 },
  { key: "wait", words: "host waits", height: 0.92 },
  { key: "call", words: "host calls", height: 0.6 },
];

/** A duration with three or four digits. */
function duration(us) {
  const size = Math.abs(us);
  if (size >= 1e6) return `${(us / 1e6).toPrecision(4)} s`;
  if (size >= 1e3) return `${(us / 1e3).toPrecision(size >= 1e4 ? 4 : 3)} ms`;
  if (size >= 1) return `${us.toPrecision(3)} µs`;
  return `${Math.round(us * 1e3)} ns`;
}

/** A moment, to a tenth of a microsecond. */
function moment(us) {
  return `${(us / 1e3).toFixed(4)} ms`;
}

/** A timeline's length, with as many digits as tell two of them apart. */
function lengthWords(us) {
  if (Math.abs(us) >= 2e6) return `${(us / 1e6).toFixed(3)} s`;
  return `${(us / 1e3).toFixed(Math.abs(us) < 1e5 ? 2 : 1)} ms`;
}

/** How a timeline's end differs from now's: "3.27 ms (13.6 %) shorter". */
function difference(nowUs, fixedUs) {
  const savedUs = nowUs - fixedUs;
  const percent = nowUs ? (Math.abs(savedUs) / nowUs) * 100 : 0;
  if (percent < 0.05) return "as long as now";
  return `${lengthWords(Math.abs(savedUs))} (${percent.toFixed(1)} %) ${savedUs > 0 ? "shorter" : "longer"}`;
}

/** The step of round times, 1, 2 or 5 times a power of ten, of which at most this many fit. */
function roundStep(lengthUs, most) {
  const rough = lengthUs / Math.max(most, 1);
  const power = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 5, 10].map((digit) => digit * power).find((step) => step >= rough * 0.999);
}

/** Times on an axis with this step, all with one unit and as many decimals as they need. */
function tickWords(stepUs, largestUs) {
  const [unit, perUs] = largestUs >= 2e6 ? ["s", 1e-6] : largestUs >= 2e3 ? ["ms", 1e-3] : ["µs", 1];
  const decimals = Math.max(0, -Math.floor(Math.log10(stepUs * perUs * 1.001)));
  return (us) => `${(us * perUs).toFixed(decimals)} ${unit}`;
}

const GENERIC = /^(Kernel\d?|kernel|device_kernel|reduce_kernel|\w*elementwise_kernel)$/;
const TELLING = /\b(cutlass_\w+|\w*gemm\w*)\b|(\w+?)(?:CUDA)?(?:Functor|KernelImpl|_kernel_cuda|_kernel_impl|Ops)\b/;

/**
 * A kernel's name without what is the same in most: its return type, arguments, template arguments and namespaces.
 * A kernel that is made for any operation is named after the one that it is made for.
 */
function shortName(name) {
  let bare = name.replace(/^(void|static|__global__)\s+/, "");
  for (let before = ""; before !== bare; ) [before, bare] = [bare, bare.replace(/<[^<>]*>/g, "")];
  bare = bare.replace(/\(anonymous namespace\)::/g, "").replace(/\(.*$/, "");
  const last = /^[\w:~ ]+$/.test(bare) ? bare.split("::").pop() : bare;
  if (GENERIC.test(last)) {
    const found = TELLING.exec(name.slice(name.indexOf("<") + 1));
    if (found) return found[1] ?? found[2];
  }
  return last.trim() || name;
}

/** A text that begins like a sentence, unless it begins with a name such as cudaFree or find_unused_parameters. */
function sentence(text) {
  return /^[a-z]+ /.test(text) ? text[0].toUpperCase() + text.slice(1) : text;
}

/** A new element with text and children. */
function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}
