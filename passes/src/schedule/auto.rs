//! Selects the schedule by the cost model: several are generated, laid out in memory and simulated.
//!
//! Candidates are the fixed schedule `pre` with two units in flight, schedules that gather more units ahead, schedules that issue every
//! gather ahead by a multiple of its predicted duration, and the best of these with some units, up to as many as fit in memory, staying
//! gathered from forward to backward ([`unshard`]). The fastest that fits the budget, or else the device, is kept; ties go to the one with
//! the least memory. So the choice is never slower in the simulator than the fixed schedule, where that one fits.

use super::{BackwardPrefetch, Prefetch, schedule, unshard};
use crate::cost::Cluster;
use crate::memory;
use crate::simulate::simulate;
use frit_ir::plan::{Plan, UnitId};

/// The schedule that users choose if they do not measure.
pub const USUAL: Prefetch =
    Prefetch::Fixed { backward: BackwardPrefetch::Pre, forward: 1, limit: 2 };

/// Units that are gathered ahead.
const AHEAD: &[usize] = &[2, 3, 4, 8];

/// Leads, in predicted durations of the gather.
const LEADS: &[f64] = &[1.0, 1.5, 2.0, 4.0];

/// Times that differ by less than this part are the same.
const SAME: f64 = 2e-4;

/// A schedule that was chosen.
#[derive(Debug)]
pub struct Chosen {
    /// The scheduled plan, with its memory.
    pub plan: Plan,
    /// Seconds of a step.
    pub seconds: f64,
    /// Seconds of a step with [`USUAL`].
    pub usual_seconds: f64,
    /// Arena bytes of a rank.
    pub peak_bytes: u64,
    /// Whether that is within the budget.
    pub fits: bool,
    what: String,
}

impl Chosen {
    /// Whether this is to be preferred.
    pub fn is_better_than(&self, other: &Chosen) -> bool {
        match () {
            () if self.fits != other.fits => self.fits,
            () if !self.fits => self.peak_bytes < other.peak_bytes,
            () if (self.seconds / other.seconds - 1.0).abs() < SAME => {
                self.peak_bytes < other.peak_bytes && self.seconds <= self.usual_seconds
            }
            () => self.seconds < other.seconds,
        }
    }

    /// The choice.
    pub fn describe(&self, cluster: &Cluster) -> String {
        format!(
            "{}: {:.3} ms on {}, {:.3} ms with pre",
            self.what,
            1e3 * self.seconds,
            cluster.name,
            1e3 * self.usual_seconds
        )
    }
}

/// Schedules a lowered plan as [`USUAL`] says and assigns its memory.
pub fn usual(plan: &Plan, cluster: &Cluster, budget: Option<u64>) -> Chosen {
    let room = budget.unwrap_or(u64::MAX);
    let search = Search { plan, cluster, room, usual_seconds: f64::INFINITY };
    let made = search.make("pre with 2 units in flight".into(), &USUAL, &[]);
    Chosen { usual_seconds: made.seconds, ..made }
}

/// Schedules a lowered plan for a cluster and assigns its memory.
pub fn choose(plan: &Plan, cluster: &Cluster, budget: Option<u64>) -> Chosen {
    let mut best = usual(plan, cluster, budget);
    let room = budget.unwrap_or_else(|| cluster.free_bytes().max(best.peak_bytes));
    let search = Search { plan, cluster, room, usual_seconds: best.seconds };
    let ahead = AHEAD.iter().map(|n| (format!("{n} units ahead"), Prefetch::Ahead(*n)));
    let leads = LEADS.iter().map(|l| (format!("a lead of {l}"), Prefetch::Lead(*l)));
    let mut chosen = USUAL;
    for (what, prefetch) in ahead.chain(leads) {
        let candidate = search.make(what, &prefetch, &[]);
        if candidate.is_better_than(&best) {
            (best, chosen) = (candidate, prefetch);
        }
    }
    search.unshard(best, &chosen)
}

struct Search<'a> {
    plan: &'a Plan,
    cluster: &'a Cluster,
    /// Bytes that may be used.
    room: u64,
    usual_seconds: f64,
}

impl Search<'_> {
    fn make(&self, what: String, prefetch: &Prefetch, kept: &[UnitId]) -> Chosen {
        let mut plan = self.plan.clone();
        unshard::keep(&mut plan, kept);
        schedule(&mut plan, prefetch);
        memory::assign(&mut plan);
        let simulation = simulate(&plan, self.cluster);
        let (seconds, peak_bytes) = (simulation.step_seconds, simulation.peak_bytes);
        let fits = peak_bytes <= self.room;
        Chosen { plan, seconds, usual_seconds: self.usual_seconds, peak_bytes, fits, what }
    }

    /// Keeps units gathered if that is faster: the most that there is room for, or a half or a quarter of
    /// them.
    fn unshard(&self, mut best: Chosen, prefetch: &Prefetch) -> Chosen {
        let units = unshard::by_benefit(self.plan);
        let base = best.what.clone();
        let make = |n: usize| {
            let what = format!("{base}, {n} units that stay gathered");
            self.make(what, prefetch, &units[..n])
        };
        let (mut fitting, mut too_many) = (0, units.len() + 1);
        let mut n = units.len();
        while n > fitting && n < too_many {
            let candidate = make(n);
            if candidate.fits {
                fitting = n;
                if candidate.is_better_than(&best) {
                    best = candidate;
                }
            } else {
                too_many = n;
            }
            n = fitting + (too_many - fitting) / 2;
        }
        for n in [fitting / 2, fitting / 4] {
            if n > 0 {
                let candidate = make(n);
                if candidate.is_better_than(&best) {
                    best = candidate;
                }
            }
        }
        best
    }
}
