//! Operand digests: for every task, a digest of what it computes and of the writers of all bytes it reads. They
//! identify the meaning of a program independently of order and addresses.
//!
//! The step is executed symbolically in list order, twice, with up to two micro-steps each, so that dependencies
//! between steps are covered. Each byte range records its writer: a task, identified by its number in the order of lowering and its work, or
//! before the first step a parameter, state, input or constant, identified by name. A task's digest covers its
//! work and, for every execution, the writers of all bytes that it reads, with their positions within the
//! writer's result.
//!
//! A gather is identified by the data it delivers, not by its task: two gathers of the same parts are
//! interchangeable, and so is a gather among a few ranks of parts that they kept from another gather. Copies
//! between device and host preserve the writer, so a plan with offload has the same digests as one without.
//!
//! Lowering records the digests of its program, in which every buffer has its own bytes. Scheduling and packing
//! must not change them; `verify_plan` recomputes them from the final order and addresses.

use super::{Action, Arena, BufferId, ParamHome, PhaseName, Place, Plan, TaskId, TiVec};
use rangemap::RangeMap;
use sha2::{Digest as _, Sha256};
use std::collections::HashMap;
use std::ops::Range;

/// Where a buffer's bytes are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Addresses {
    /// Every buffer by itself.
    Apart,
    /// At its offset within its arena.
    Assigned,
}

/// The first half of a SHA-256.
type Sum = u128;

/// A digest in the making.
#[derive(Clone)]
struct Digest(Sha256);

impl Digest {
    fn new() -> Digest {
        Digest(Sha256::new())
    }

    fn number(&mut self, number: u64) {
        self.0.update(number.to_le_bytes());
    }

    fn sum(&mut self, sum: Sum) {
        self.0.update(sum.to_be_bytes());
    }

    fn count(&mut self, count: usize) {
        self.number(count as u64);
    }

    fn text(&mut self, text: &str) {
        self.count(text.len());
        self.0.update(text);
    }

    fn end(self) -> Sum {
        self.0.finalize().iter().take(16).fold(0, |sum, byte| sum << 8 | Sum::from(*byte))
    }
}

/// The writer of some bytes, and the address of the first byte that it wrote; these bytes may be a part of them.
#[derive(Clone, Copy, PartialEq)]
struct Written {
    by: Sum,
    origin: isize,
}

/// A part of a range, relative to its first byte.
struct Part {
    at: usize,
    bytes: usize,
    by: Sum,
    /// The first byte, relative to the write.
    from: usize,
}

/// Writers by address.
type Map = RangeMap<usize, Written>;

struct Replay<'a> {
    plan: &'a Plan,
    addresses: Addresses,
    /// One per arena, or one per buffer.
    maps: Vec<Map>,
    /// The digest of each task, by index.
    work: TiVec<TaskId, Sum>,
    digests: TiVec<TaskId, Digest>,
    executions: TiVec<TaskId, u64>,
    /// The writer of a gathered buffer, by the digest of the gather of its kept parts.
    kept: HashMap<Sum, Sum>,
}

/// Most micro-steps of one step that are executed.
const MICRO_STEPS: usize = 2;

/// The digests by task, and that of everything persistent after the steps.
pub fn provenance(plan: &Plan, addresses: Addresses) -> (TiVec<TaskId, String>, String) {
    let n_maps = match addresses {
        Addresses::Apart => plan.buffers.len(),
        Addresses::Assigned => Arena::ALL.len(),
    };
    let mut replay = Replay {
        plan,
        addresses,
        maps: vec![Map::new(); n_maps],
        work: plan.tasks.iter().map(|t| work(plan, &t.action)).collect(),
        digests: vec![Digest::new(); plan.tasks.len()].into(),
        executions: vec![0; plan.tasks.len()].into(),
        kept: HashMap::new(),
    };
    replay.first_values();
    for _ in 0..2 {
        for phase in &plan.phases {
            let micro = phase.name == PhaseName::MicroStep;
            for _ in 0..if micro { plan.accumulation.min(MICRO_STEPS) } else { 1 } {
                phase.tasks().for_each(|i| replay.task(i));
            }
        }
    }
    let mut rest = Digest::new();
    for (b, buffer) in plan.buffers.iter_enumerated() {
        if buffer.arena.outlives_step() {
            replay.read(b, 0, buffer.bytes, &mut rest);
        }
    }
    for metric in &plan.metrics {
        rest.text(metric.name.word());
        replay.read(metric.place.buffer, metric.place.offset, metric.place.ty.bytes(), &mut rest);
    }
    let mut tasks = TiVec::with_capacity(plan.tasks.len());
    for (mut digest, work) in replay.digests.into_iter().zip(replay.work) {
        digest.sum(work);
        tasks.push(format!("{:032x}", digest.end()));
    }
    (tasks, format!("{:032x}", rest.end()))
}

/// The action of a task, independent of operand addresses.
fn work(plan: &Plan, action: &Action) -> Sum {
    let mut digest = Digest::new();
    let (what, detail) = match action {
        Action::Kernel { kernel, .. } => ("kernel", plan.kernels[*kernel].hash.clone()),
        Action::AllGather { group, ranks, .. } => ("all_gather", format!("{group} {ranks:?}")),
        Action::Reshard { group, ranks, .. } => ("reshard", format!("{group} {ranks}")),
        Action::ReduceScatter { group, reduce, .. } => {
            ("reduce_scatter", format!("{group} {reduce:?}"))
        }
        Action::AllReduce { group, reduce, .. } => {
            ("all_reduce", format!("{:?} {reduce:?}", group.map(|g| g.0)))
        }
        Action::Copy { .. } => ("copy", String::new()),
        Action::Zero { .. } => ("zero", String::new()),
    };
    digest.text(what);
    digest.text(&detail);
    for place in action.reads().into_iter().chain(action.writes()) {
        digest.text(&place.ty.to_string());
    }
    digest.end()
}

impl Replay<'_> {
    /// Contents of persistent bytes before the first step.
    fn first_values(&mut self) {
        let plan = self.plan;
        for group in &plan.groups {
            let masters = [("param".to_string(), group.master, 0.0)];
            let states = group.states.iter().map(|s| (s.name.to_string(), s.buffer, s.init));
            let copies = group.copies.iter().map(|c| (c.dtype.to_string(), c.buffer, 0.0));
            for (kind, buffer, init) in masters.into_iter().chain(states).chain(copies) {
                let mut digest = Digest::new();
                digest.text(&kind);
                digest.number(init.to_bits());
                group.gather_dtypes.iter().for_each(|dtype| digest.text(dtype.name()));
                // Ranks hold parts at other elements: the table stands for all of them.
                for segment in &group.segments {
                    digest.text(&plan.params[segment.param].name);
                    digest.count(segment.offset);
                }
                digest.count(group.numel);
                digest.count(group.shard_numel);
                digest.text(group.dtype.name());
                self.leaf(buffer, digest);
            }
            if let Some(offsets) = group.param_group_offsets {
                let mut digest = Digest::new();
                digest.text("parameter groups");
                for settings in &group.param_groups {
                    digest.count(settings.offset);
                    digest.text(&settings.lr);
                    digest.text(&settings.weight_decay);
                }
                digest.count(group.master.0);
                self.leaf(offsets, digest);
            }
            if let Some(offsets) = group.param_offsets {
                let mut digest = Digest::new();
                digest.text("parameters");
                group.segments.iter().for_each(|s| digest.count(s.offset));
                digest.count(group.master.0);
                self.leaf(offsets, digest);
            }
        }
        for param in &plan.params {
            if let ParamHome::Buffer(buffer) = param.home {
                self.named(buffer, "param", &param.name);
            }
        }
        for s in &plan.states {
            self.named(s.buffer, "state", &format!("{} {} {:?}", s.name, s.ty, s.init));
        }
        plan.inputs
            .iter()
            .for_each(|i| self.named(i.buffer, "input", &format!("{} {}", i.name, i.ty)));
        plan.hyper.iter().for_each(|h| self.named(h.buffer, "hyper", &h.name));
        for c in &plan.constants {
            self.named(c.buffer, "constant", &format!("{} {}", c.name, c.ty));
        }
    }

    fn named(&mut self, buffer: BufferId, kind: &str, name: &str) {
        let mut digest = Digest::new();
        digest.text(kind);
        digest.text(name);
        self.leaf(buffer, digest);
    }

    fn leaf(&mut self, buffer: BufferId, digest: Digest) {
        let bytes = self.plan.buffers[buffer].bytes;
        self.write(buffer, 0, bytes, digest.end());
    }

    fn task(&mut self, i: TaskId) {
        let task = &self.plan.tasks[i];
        let mut digest = self.digests[i].clone();
        for place in task.action.reads() {
            self.read(place.buffer, place.offset, place.ty.bytes(), &mut digest);
        }
        self.digests[i] = digest;
        self.executions[i] += 1;
        if let Action::AllGather { send, recv, .. } = &task.action {
            let mut parts = Digest::new();
            parts.sum(self.work[i]);
            self.read(send.buffer, send.offset, send.ty.bytes(), &mut parts);
            // Kept parts that are gathered again give the same value.
            let parts = parts.end();
            let whole = self.kept.get(&parts).copied().unwrap_or(parts);
            self.write(recv.buffer, recv.offset, recv.ty.bytes(), whole);
            return;
        }
        if let Action::Reshard { group, ranks, from, to } = &task.action {
            let mut part = Digest::new();
            part.sum(self.work[i]);
            self.read(from.buffer, from.offset, from.ty.bytes(), &mut part);
            self.write(to.buffer, to.offset, to.ty.bytes(), part.end());
            if let Some(whole) = self.written_at_once(from) {
                // The digest of the gather that makes the whole of such parts.
                let (send, recv) = (to.clone(), from.clone());
                let gather = Action::AllGather { group: *group, ranks: Some(*ranks), send, recv };
                let mut parts = Digest::new();
                parts.sum(work(self.plan, &gather));
                self.read(to.buffer, to.offset, to.ty.bytes(), &mut parts);
                self.kept.insert(parts.end(), whole);
            }
            return;
        }
        if let (Action::Copy { from, to }, Some(_)) =
            (&task.action, self.plan.host_copy(&task.action))
        {
            for part in self.writers(from.buffer, from.offset, from.ty.bytes()) {
                self.put(to.buffer, to.offset + part.at, part.bytes, (part.by, part.from));
            }
            return;
        }
        for (n, place) in task.action.writes().into_iter().enumerate() {
            let mut by = Digest::new();
            by.count(task.lowered);
            by.sum(self.work[i]);
            by.number(self.executions[i]);
            by.count(n);
            self.write(place.buffer, place.offset, place.ty.bytes(), by.end());
        }
    }

    /// The map of a buffer's bytes, and its first byte there.
    fn base(&self, buffer: BufferId) -> (usize, usize) {
        match (self.addresses, &self.plan.buffers[buffer]) {
            (Addresses::Apart, _) => (buffer.0, 0),
            (Addresses::Assigned, b) => (b.arena as usize, b.offset),
        }
    }

    /// The single task that wrote all bytes of a place.
    fn written_at_once(&self, place: &Place) -> Option<Sum> {
        let parts = self.writers(place.buffer, place.offset, place.ty.bytes());
        let [Part { bytes, by, from: 0, .. }] = parts[..] else { return None };
        (bytes == place.ty.bytes()).then_some(by)
    }

    /// The written parts of a range.
    fn writers(&self, buffer: BufferId, offset: usize, bytes: usize) -> Vec<Part> {
        if bytes == 0 {
            return vec![];
        }
        let (map, base) = self.base(buffer);
        let (begin, end) = (base + offset, base + offset + bytes);
        let part = |(range, written): (&Range<usize>, &Written)| {
            let first = range.start.max(begin);
            let from = (first as isize - written.origin) as usize;
            Part { at: first - begin, bytes: range.end.min(end) - first, by: written.by, from }
        };
        self.maps[map].overlapping(begin..end).map(part).collect()
    }

    fn read(&self, buffer: BufferId, offset: usize, bytes: usize, digest: &mut Digest) {
        for part in self.writers(buffer, offset, bytes) {
            digest.count(part.at);
            digest.count(part.at + part.bytes);
            digest.sum(part.by);
            digest.count(part.from);
        }
        // The end of one operand is not the beginning of another.
        digest.count(bytes);
    }

    fn write(&mut self, buffer: BufferId, offset: usize, bytes: usize, by: Sum) {
        self.put(buffer, offset, bytes, (by, 0));
    }

    /// Records a write: the writer, and its first byte.
    fn put(&mut self, buffer: BufferId, offset: usize, bytes: usize, (by, from): (Sum, usize)) {
        if bytes > 0 {
            let (map, base) = self.base(buffer);
            let begin = base + offset;
            let origin = begin as isize - from as isize;
            self.maps[map].insert(begin..begin + bytes, Written { by, origin });
        }
    }
}
