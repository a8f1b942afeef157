// Spans by lane in typed arrays, and what is looked up in them. All times are in microseconds.

/** The spans of one lane, sorted by start. They may overlap, as those of a host's threads do. */
class Lane {
  constructor(numSpans) {
    this.length = 0;
    this.starts = new Float64Array(numSpans);
    this.ends = new Float64Array(numSpans);
    /** The latest end of the spans up to each: it never falls, so that a binary search finds the first one that is seen. */
    this.reach = new Float64Array(numSpans);
    this.names = new Uint32Array(numSpans);
    this.kinds = new Uint8Array(numSpans);
  }

  add(startUs, durationUs, name, kind) {
    const n = this.length++;
    this.starts[n] = startUs;
    this.ends[n] = startUs + durationUs;
    this.reach[n] = n ? Math.max(this.reach[n - 1], this.ends[n]) : this.ends[n];
    this.names[n] = name;
    this.kinds[n] = kind;
  }

  /** The first span that does not end before this time; those before it all do. */
  firstFrom(timeUs) {
    return search(this.reach, this.length, timeUs, false);
  }

  /** The first span that starts after this time. */
  firstAfter(timeUs) {
    return search(this.starts, this.length, timeUs, true);
  }

  /** The shortest span at this time; else the nearest one within the slack; else -1. */
  at(timeUs, slackUs) {
    let best = -1;
    let bestRank = Infinity;
    const end = this.firstAfter(timeUs + slackUs);
    for (let n = this.firstFrom(timeUs - slackUs); n < end; n++) {
      const away = Math.max(this.starts[n] - timeUs, timeUs - this.ends[n], 0);
      if (away > slackUs) continue;
      const rank = away ? 1e15 + away : this.ends[n] - this.starts[n];
      if (rank <= bestRank) {
        best = n;
        bestRank = rank;
      }
    }
    return best;
  }
}

/** Of sorted numbers, the index of the first that is at least (or, `isStrict`, above) the limit. */
function search(numbers, length, limit, isStrict) {
  let low = 0;
  let high = length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (isStrict ? numbers[middle] > limit : numbers[middle] >= limit) high = middle;
    else low = middle + 1;
  }
  return low;
}

/** What ran when: a lane for each of the report's. */
class Timeline {
  constructor(data, numLanes) {
    this.endUs = data.end_us;
    this.numSpans = data.spans.length;
    const counts = new Uint32Array(numLanes);
    for (const span of data.spans) counts[span[0]]++;
    this.lanes = Array.from(counts, (count) => new Lane(count));
    for (const [lane, startUs, durationUs, name, kind] of data.spans) this.lanes[lane].add(startUs, durationUs, name, kind);
  }
}
