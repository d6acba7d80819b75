//! Wrong lemmas, which the differences refute: a test that accepted them would say nothing.

use super::Trial;
use super::cases::cases;
use super::draw::Case;
use crate::gradient::term::Term;
use crate::gradient::{Cotangents, Site, lemmas};
use frit_ir::ops::*;
use std::collections::{BTreeMap, BTreeSet};

/// A change of the cotangents that a lemma gives, or none if it does not apply to them.
type Change = for<'w> fn(&Site<'w>, &Cotangents<'w>) -> Option<Cotangents<'w>>;

/// The first cotangent that is asked for, changed.
fn first<'w>(
    at: &Site<'w>,
    dx: &Cotangents<'w>,
    change: impl FnOnce(Term<'w>) -> Option<Term<'w>>,
) -> Option<Cotangents<'w>> {
    let mut changed = dx.clone();
    let (place, _) =
        changed.iter_mut().zip(&at.needed).find(|(dx, needed)| dx.is_some() && **needed)?;
    *place = Some(change((*place)?)?);
    Some(changed)
}

fn dropped<'w>(_: &Site<'w>, dx: &Cotangents<'w>) -> Option<Cotangents<'w>> {
    dx.iter().flatten().next().map(|_| vec![None; dx.len()])
}

fn negative<'w>(at: &Site<'w>, dx: &Cotangents<'w>) -> Option<Cotangents<'w>> {
    first(at, dx, |dx| Some(-dx))
}

fn with_a_factor<'w>(at: &Site<'w>, dx: &Cotangents<'w>) -> Option<Cotangents<'w>> {
    first(at, dx, |dx| Some(dx * 1.0625))
}

/// Reversed along the first axis of at least two elements.
fn reversed<'w>(at: &Site<'w>, dx: &Cotangents<'w>) -> Option<Cotangents<'w>> {
    first(at, dx, |dx| {
        let size = dx.dims();
        let axis = size.iter().position(|d| *d > 1)?;
        let (mut start, mut step) = (vec![0; size.len()], vec![1; size.len()]);
        (start[axis], step[axis]) = (size[axis] - 1, -1);
        Some(Term::of(Op::Slice(Slice { start, size, step }), &[dx]))
    })
}

/// Cotangents of two operands of one shape exchanged.
fn exchanged<'w>(at: &Site<'w>, dx: &Cotangents<'w>) -> Option<Cotangents<'w>> {
    let n = dx.len().min(at.x.len());
    let pairs = (0..n).flat_map(|i| (0..i).map(move |j| (j, i)));
    let alike = |(i, j): &(usize, usize)| {
        let both = dx[*i].is_some() && dx[*j].is_some() && at.needed[*i] && at.needed[*j];
        both && at.x[*i].dims() == at.x[*j].dims()
    };
    let (i, j) = pairs.into_iter().find(alike)?;
    let mut changed = dx.clone();
    changed.swap(i, j);
    Some(changed)
}

const CHANGES: [(&str, Change); 5] = [
    ("dropped", dropped),
    ("negative", negative),
    ("with a factor", with_a_factor),
    ("reversed", reversed),
    ("exchanged", exchanged),
];

/// A lemma for the operation of a case, whose operands are the first values; others have their own.
fn only_for<'c>(
    case: &'c Case,
    lemma: impl for<'w> Fn(&Op, &Site<'w>) -> Option<Cotangents<'w>> + 'c,
) -> impl for<'w> Fn(&Op, &Site<'w>) -> Option<Cotangents<'w>> + 'c {
    move |op: &Op, at: &Site<'_>| {
        let is_case =
            *op == case.op && at.x.iter().all(|x| (x.id.0 as usize) < case.operands.len());
        if is_case { lemma(op, at) } else { lemmas::cotangents(op, at) }
    }
}

/// How many mutants of each operation and kind there were, and how many were refuted.
type Counts = BTreeMap<(&'static str, String), [usize; 2]>;

fn count(counts: &mut Counts, name: &'static str, kind: &str, refuted: bool) {
    let [all, found] = counts.entry((name, kind.into())).or_default();
    *all += 1;
    *found += usize::from(refuted);
}

/// The operations that take part, and the mutants that no case refutes.
fn survivors(counts: &Counts) -> Vec<(&'static str, &str)> {
    let survived = counts.iter().filter(|(_, [_, refuted])| *refuted == 0);
    survived.map(|((name, kind), _)| (*name, &**kind)).collect()
}

#[test]
fn changed_cotangents_are_refuted_for_every_operation() {
    let (mut counts, mut n_shown) = (Counts::new(), 0);
    let mut flat = BTreeSet::new();
    for case in cases(7).into_iter().chain(cases(8)) {
        let trial = Trial::of(&case);
        for (kind, change) in CHANGES {
            let applies = std::cell::Cell::new(false);
            let mutant = only_for(&case, |op, at| {
                let dx = lemmas::cotangents(op, at)?;
                let changed = change(at, &dx);
                applies.set(changed.is_some());
                Some(changed.unwrap_or(dx))
            });
            let refuted = trial.refuted(&mutant).is_some();
            if applies.get() {
                count(&mut counts, case.op.name(), kind, refuted);
                // The first operand that is trained is the first whose cotangent is asked for.
                let size = trial.expected[0].1.iter().fold(0f64, |size, x| size.max(x.abs()));
                let is_scaled = matches!(kind, "dropped" | "negative" | "with a factor");
                let shows = is_scaled && size > 1e-3 && trial.tolerance() < 1e-6;
                assert!(refuted || !shows, "{kind}: {case:?}");
                n_shown += usize::from(shows);
            }
        }
        flat.insert(case.op.name());
    }
    // The sum has the same cotangent for both.
    assert_eq!(survivors(&counts), [("add", "exchanged")]);
    for (name, _) in counts.keys() {
        flat.remove(name);
    }
    assert_eq!(Vec::from_iter(flat), ["ceil", "detach", "floor", "round", "sign"]);
    let mutants: usize = counts.values().map(|[all, _]| all).sum();
    assert!(mutants > 5000 && n_shown > 3000, "{mutants} {n_shown}");
}

/// Operations whose lemma is wrong for this one: with other attributes, or another function.
fn others(op: &Op) -> Vec<(String, Op)> {
    let mut all: Vec<(&str, Op)> = Vec::new();
    match op.clone() {
        Op::Unary(f) => {
            let functions = UnaryFn::ALL.iter().filter(|g| **g != f && **g != UnaryFn::Not);
            return functions.map(|g| (g.name().into(), Op::Unary(*g))).collect();
        }
        Op::Binary(f) => {
            let functions = BinaryFn::ALL.iter().filter(|g| **g != f);
            return functions.map(|g| (g.name().into(), Op::Binary(*g))).collect();
        }
        Op::Clip(Clip { min, max }) => {
            all.push(("bounds", Op::Clip(Clip { min: max, max: min })));
        }
        Op::Transpose(Transpose { perm }) => {
            let inverse = Transpose { perm }.inverse();
            all.push(("inverse", Op::Transpose(inverse)));
        }
        Op::Slice(Slice { start, size, step }) => {
            let shifted = start.iter().map(|i| i + 1).collect();
            all.push((
                "start",
                Op::Slice(Slice { start: shifted, size: size.clone(), step: step.clone() }),
            ));
            let step = step.iter().map(|step| step + step.signum()).collect();
            all.push(("step", Op::Slice(Slice { start, size, step })));
        }
        Op::Pad(Pad { low, high, value }) => {
            all.push(("border", Op::Pad(Pad { low: high, high: low, value })));
        }
        Op::Embedding(Embedding { padding_idx }) => {
            let padding_idx = if padding_idx.is_some() { None } else { Some(0) };
            all.push(("padding", Op::Embedding(Embedding { padding_idx })));
        }
        Op::Gather(Gather { axis }) => all.push(("axis", Op::Gather(Gather { axis: axis ^ 1 }))),
        Op::GatherElements(GatherElements { axis }) => {
            all.push(("axis", Op::GatherElements(GatherElements { axis: axis ^ 1 })));
        }
        Op::TopK(op) => all.push(("axis", Op::TopK(TopK { axis: op.axis ^ 1, ..op }))),
        Op::ScatterElements(op) => {
            let axis = op.axis ^ 1;
            all.push(("axis", Op::ScatterElements(ScatterElements { axis, ..op })));
            for f in ScatterFn::ALL.iter().filter(|f| **f != op.f) {
                let name = format!("{} for {}", f.name(), op.f.name());
                let op = ScatterElements { f: *f, ..op };
                all.push((name.leak(), Op::ScatterElements(op)));
            }
        }
        Op::ScatterNd(op) => {
            for f in ScatterFn::ALL.iter().filter(|f| **f != op.f) {
                let name = format!("{} for {}", f.name(), op.f.name());
                all.push((name.leak(), Op::ScatterNd(ScatterNd { f: *f, ..op })));
            }
        }
        Op::CumSum(op) => {
            let (exclusive, reverse) = (!op.exclusive, !op.reverse);
            all.push(("axis", Op::CumSum(CumSum { axis: 1 - op.axis, ..op.clone() })));
            all.push(("exclusive", Op::CumSum(CumSum { exclusive, ..op.clone() })));
            all.push(("reverse", Op::CumSum(CumSum { reverse, ..op })));
        }
        Op::Reduce(op) => {
            use ReduceFn::{Max, Mean, Min, Prod, Sum};
            for f in [Sum, Mean, Max, Min, Prod].into_iter().filter(|f| *f != op.f) {
                let name = format!("{f:?} for {:?}", op.f);
                all.push((name.leak(), Op::Reduce(Reduce { f, ..op.clone() })));
            }
        }
        Op::Softmax(Softmax { axis }) => {
            all.push(("axis", Op::Softmax(Softmax { axis: (axis + 1) % 3 })));
            all.push(("logarithm", Op::LogSoftmax(LogSoftmax { axis })));
        }
        Op::LogSoftmax(LogSoftmax { axis }) => {
            all.push(("axis", Op::LogSoftmax(LogSoftmax { axis: (axis + 1) % 3 })));
            all.push(("exponential", Op::Softmax(Softmax { axis })));
        }
        Op::MatMul(op) => {
            let (trans_a, trans_b) = (!op.trans_a, !op.trans_b);
            all.push(("trans_a", Op::MatMul(MatMul { trans_a, ..op.clone() })));
            all.push(("trans_b", Op::MatMul(MatMul { trans_b, ..op })));
        }
        Op::Conv(op) => {
            for (name, window) in windows(&op.window) {
                all.push((name, Op::Conv(Conv { window, ..op.clone() })));
            }
            let groups = 3 - op.groups;
            all.push(("groups", Op::Conv(Conv { groups, ..op })));
        }
        Op::ConvGradInput(op) => {
            for (name, window) in windows(&op.window) {
                all.push((name, Op::ConvGradInput(ConvGradInput { window, ..op.clone() })));
            }
            let groups = 3 - op.groups;
            all.push(("groups", Op::ConvGradInput(ConvGradInput { groups, ..op })));
        }
        Op::MaxPool(op) => {
            for (name, window) in windows(&op.window) {
                all.push((name, Op::MaxPool(MaxPool { window, ..op.clone() })));
            }
            all.push(("sum", Op::SumPool(SumPool { window: op.window, taps: op.taps })));
        }
        Op::SumPool(op) => {
            for (name, window) in windows(&op.window) {
                all.push((name, Op::SumPool(SumPool { window, ..op.clone() })));
            }
            all.push(("max", Op::MaxPool(MaxPool { window: op.window, taps: op.taps })));
        }
        Op::BatchNorm(_) => all.push(("eps", Op::BatchNorm(BatchNorm { eps: 1e-5 }))),
        Op::Attention(op) => {
            let (causal, scale) = (!op.causal, 2.0 * op.scale);
            let window = if op.window.is_some() { None } else { Some(1) };
            all.push(("causal", Op::Attention(Attention { causal, ..op })));
            all.push(("window", Op::Attention(Attention { window, ..op })));
            all.push(("scale", Op::Attention(Attention { scale, ..op })));
            if op.keep.is_some() {
                all.push(("keep", Op::Attention(Attention { keep: Some(0.5), ..op })));
            }
        }
        Op::CrossEntropy(op) => {
            let classes = if op.classes.is_some() { None } else { Some(3) };
            all.push(("ignored", Op::CrossEntropy(CrossEntropy { ignore_index: 0, ..op })));
            all.push(("classes", Op::CrossEntropy(CrossEntropy { classes, ..op })));
        }
        _ => {}
    }
    all.into_iter().map(|(kind, op)| (kind.into(), op)).collect()
}

/// Windows that slide otherwise.
fn windows(window: &Window) -> Vec<(&'static str, Window)> {
    let more = |all: &[usize]| all.iter().map(|n| n + 1).collect::<Vec<usize>>();
    let w = || window.clone();
    vec![
        ("strides", Window { strides: more(&window.strides), ..w() }),
        ("dilations", Window { dilations: more(&window.dilations), ..w() }),
        ("border", Window { low: window.high.clone(), high: window.low.clone(), ..w() }),
    ]
}

#[test]
fn the_lemma_of_another_operation_is_refuted() {
    let mut counts = Counts::new();
    for case in cases(11).into_iter().chain(cases(12)) {
        let trial = Trial::of(&case);
        for (kind, other) in others(&case.op) {
            // One that does not fit these operands and results is no mutant of this case.
            let types: Vec<_> = case.operands.iter().map(|(value, _)| &value.ty).collect();
            if other.infer(&types).ok() != case.op.infer(&types).ok() {
                continue;
            }
            let mutant = only_for(&case, |_, at| lemmas::cotangents(&other, at));
            count(&mut counts, case.op.name(), &kind, trial.refuted(&mutant).is_some());
        }
    }
    let flat = ["ceil", "detach", "floor", "round", "sign"];
    let is_equal = |name: &str, other: &str| match (name, other) {
        // (±1)² is 1.
        ("sign", "tanh") => true,
        // The extreme is read from the result, and what replaced an element is what is there.
        ("reduce", "Max for Min" | "Min for Max") => true,
        ("scatter_elements" | "scatter_nd", "max for min" | "min for max") => true,
        ("scatter_elements" | "scatter_nd", "max for replace" | "min for replace") => true,
        _ => flat.contains(&name) && flat.contains(&other),
    };
    let survivors = survivors(&counts);
    let wrong: Vec<_> = survivors.iter().filter(|(name, kind)| !is_equal(name, kind)).collect();
    assert!(wrong.is_empty(), "{wrong:?}");
    let names: BTreeSet<&str> = counts.keys().map(|(name, _)| *name).collect();
    let tested = cases(11).into_iter().chain(cases(12)).map(|case| case.op);
    let others = tested.filter(|op| !others(op).is_empty()).map(|op| op.name());
    assert_eq!(others.collect::<BTreeSet<_>>(), names);
    assert!(counts.len() > 1200, "{}", counts.len());
}
