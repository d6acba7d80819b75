//! Durations of collectives: latency per hop plus bytes over the slowest level of the network.
//!
//! A ring over `n` ranks makes `n − 1` hops; within a node bytes pass the links of every device, between
//! nodes each byte enters a node once, through the network cards of the members of the group on it. An
//! all-reduce takes the faster of a ring and a tree, which makes `2·log2(n)` hops.
//! Source: NCCL's performance notes (nccl-tests), Sanders et al. 2009 (double binary trees).

use super::Cluster;
use frit_ir::plan::{Action, Plan};

/// The payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exchange {
    /// Every rank receives the parts of all.
    AllGather,
    /// Every rank receives its part of the sum.
    ReduceScatter,
    /// Every rank receives the whole sum.
    AllReduce,
}

/// The payload of an action and its bytes over all ranks; `None` if it is not a collective.
pub fn exchange_of(action: &Action) -> Option<(Exchange, u64)> {
    let (exchange, whole) = match action {
        Action::AllGather { recv, .. } => (Exchange::AllGather, recv),
        Action::ReduceScatter { send, .. } => (Exchange::ReduceScatter, send),
        Action::AllReduce { send, .. } => (Exchange::AllReduce, send),
        _ => return None,
    };
    Some((exchange, whole.ty.bytes() as u64))
}

/// Ranks that exchange: `n` of them, `stride` apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Members {
    /// Number of ranks.
    pub n: usize,
    /// Distance of neighbors; 1 for a contiguous group.
    pub stride: usize,
}

impl Members {
    /// The ranks that take part in a collective.
    pub fn of(plan: &Plan, action: &Action) -> Members {
        plan.team(action, 0).map_or(Members::all(1), |t| Members { n: t.count, stride: t.stride })
    }

    /// All of `n` ranks.
    pub fn all(n: usize) -> Members {
        Members { n, stride: 1 }
    }
}

/// How long an exchange takes, and on which level of the network.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Duration {
    /// Seconds.
    pub seconds: f64,
    /// Whether it crosses nodes.
    pub inter: bool,
}

impl Cluster {
    /// Duration of an exchange of `bytes`, the size of the whole, among `members`.
    pub fn exchange(&self, exchange: Exchange, bytes: u64, members: Members) -> Duration {
        let n = members.n.max(1);
        if n == 1 {
            return Duration { seconds: 1e-6 * self.device.launch_us, inter: false };
        }
        let per_node = (self.devices_per_node / members.stride.max(1)).clamp(1, n);
        let nodes = n.div_ceil(per_node);
        let bytes = bytes as f64;
        // Seconds in which the whole passes every rank once.
        let mut once = 0.0_f64;
        if per_node > 1 {
            let part = (n - 1) as f64 / n as f64;
            once = once.max(bytes * part / (1e9 * self.intra.gb_per_s));
        }
        if nodes > 1 {
            let part = (nodes - 1) as f64 / nodes as f64;
            once = once.max(bytes * part / (1e9 * self.inter.gb_per_s * per_node as f64));
        }
        let hops = |across: f64, within: f64| {
            1e-6 * (across * self.inter.hop_us + within * self.intra.hop_us)
        };
        let ring = hops((nodes - 1) as f64, (n - nodes) as f64);
        let tree = 2.0 * hops((nodes as f64).log2().ceil(), (per_node as f64).log2().ceil());
        let start = 1e-6 * self.collective_us;
        let seconds = match exchange {
            Exchange::AllGather | Exchange::ReduceScatter => start + ring + once,
            Exchange::AllReduce => start + (2.0 * ring).min(tree) + 2.0 * once,
        };
        Duration { seconds, inter: nodes > 1 }
    }
}
