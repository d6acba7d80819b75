//! Einsum as transposes, matmuls and sums.
//!
//! Operands are contracted from left to right. A label that occurs in only one operand and not in the result is summed first.
//! Labels that two operands share are batch axes if a later operand or the result needs them, else they are contracted.
//! Source: ONNX Einsum-12, numpy.einsum.

use super::super::context::{Fault, NodeContext, Outcome, misfit};
use super::layout::permute;
use super::{Operator, one, op};
use frit_ir::ops::{BinaryFn, MatMul, Reduce, ReduceFn, Slice};
use frit_ir::shape::product as numel;
use frit_ir::{Op, ValueId};
use std::collections::HashMap;

pub(super) const OPERATORS: &[Operator] = &[op("Einsum", &["equation"], einsum)];

/// A value and the labels of its axes; axes of an ellipsis have labels below `FIRST_LETTER`.
#[derive(Clone, Debug)]
struct Term {
    value: ValueId,
    labels: Vec<u32>,
}

const FIRST_LETTER: u32 = 'A' as u32;

fn einsum(cx: &mut NodeContext<'_>) -> Outcome {
    let values = cx.variadic()?;
    let equation: String = cx.text("equation", "").chars().filter(|c| !c.is_whitespace()).collect();
    let (left, right) = match equation.split_once("->") {
        Some((left, right)) => (left, Some(right)),
        None => (equation.as_str(), None),
    };
    let parts: Vec<&str> = left.split(',').collect();
    if parts.len() != values.len() {
        return misfit(format!(
            "\"{equation}\" has {} operands, not {}",
            parts.len(),
            values.len()
        ));
    }
    let ellipsis = |part: &str, rank: usize| {
        if part.contains("...") { (rank + 3).checked_sub(part.len()) } else { Some(0) }
    };
    let mut widest = 0;
    for (part, value) in parts.iter().zip(&values) {
        widest = widest.max(ellipsis(part, cx.dims(*value).len()).unwrap_or(0));
    }
    let mut terms = Vec::with_capacity(values.len());
    for (part, &value) in parts.iter().zip(&values) {
        let rank = cx.dims(value).len();
        let own = ellipsis(part, rank);
        let labels = own.and_then(|n| labels(part, widest - n..widest));
        match labels.filter(|l| l.len() == rank) {
            Some(labels) => terms.push(diagonal(cx, Term { value, labels })?),
            None => return misfit(format!("\"{part}\" for an operand of {rank} axes")),
        }
    }
    let result = match right {
        Some(right) => match labels(right, 0..widest) {
            Some(labels) => labels,
            None => return misfit(format!("\"{right}\"")),
        },
        None => implicit_result(&terms, widest),
    };
    let known = |label: &u32| terms.iter().any(|t| t.labels.contains(label));
    if (0..result.len()).any(|i| result[..i].contains(&result[i])) || !result.iter().all(known) {
        return misfit(format!("\"{equation}\" has a result with labels of no operand"));
    }
    broadcast_sizes(cx, &mut terms)?;
    let mut rest = terms.into_iter();
    let Some(mut sum) = rest.next() else { return misfit("there is no operand") };
    let rest: Vec<Term> = rest.collect();
    let mut last: HashMap<u32, usize> = HashMap::new();
    for (i, term) in rest.iter().enumerate() {
        last.extend(term.labels.iter().map(|label| (*label, i)));
    }
    for (i, term) in rest.iter().enumerate() {
        let later = |label: u32| last.get(&label).is_some_and(|last| *last > i);
        let needed = |label: u32| result.contains(&label) || later(label);
        sum = product(cx, sum, term.clone(), &needed)?;
    }
    let sum = sum_out(cx, sum, &|label| result.contains(&label))?;
    let perm = positions(&result, &sum.labels);
    one(permute(cx, sum.value, perm)?)
}

/// The labels of a part of the equation; an ellipsis stands for this range.
fn labels(part: &str, ellipsis: std::ops::Range<usize>) -> Option<Vec<u32>> {
    let mut out = Vec::new();
    let (before, after) = match part.split_once("...") {
        Some((before, after)) => (before, Some(after)),
        None => (part, None),
    };
    let letters = |text: &str, out: &mut Vec<u32>| {
        let all = text.chars().all(|c| c.is_ascii_alphabetic());
        out.extend(text.chars().map(u32::from));
        all
    };
    let mut valid = letters(before, &mut out);
    if let Some(after) = after {
        out.extend(ellipsis.map(|i| i as u32));
        valid &= letters(after, &mut out);
    }
    valid.then_some(out)
}

/// Without `->`: the ellipsis, then the letters that occur once, in alphabetical order.
fn implicit_result(terms: &[Term], widest: usize) -> Vec<u32> {
    let mut times: HashMap<u32, usize> = HashMap::new();
    for label in terms.iter().flat_map(|t| &t.labels).filter(|l| **l >= FIRST_LETTER) {
        *times.entry(*label).or_default() += 1;
    }
    let once = times.into_iter().filter(|(_, n)| *n == 1);
    let mut letters: Vec<u32> = once.map(|(label, _)| label).collect();
    letters.sort_unstable();
    (0..widest as u32).chain(letters).collect()
}

/// Where each of `wanted` is among `labels`.
fn positions(wanted: &[u32], labels: &[u32]) -> Vec<usize> {
    wanted.iter().filter_map(|w| labels.iter().position(|l| l == w)).collect()
}

/// An operand that names one label twice stands for its diagonal: every `n+1`-th of the `n²` elements.
fn diagonal(cx: &mut NodeContext<'_>, term: Term) -> Result<Term, Fault> {
    let repeated =
        |l: &[u32]| (0..l.len()).find_map(|j| Some((l[..j].iter().position(|x| *x == l[j])?, j)));
    let Some((i, j)) = repeated(&term.labels) else { return Ok(term) };
    let dims = cx.dims(term.value);
    let n = dims[i];
    if dims[j] != n {
        return misfit(format!("a diagonal of axes with sizes {n} and {}", dims[j]));
    }
    let others: Vec<usize> = (0..dims.len()).filter(|a| *a != i && *a != j).collect();
    let moved = permute(cx, term.value, others.iter().copied().chain([i, j]).collect())?;
    let mut flat: Vec<usize> = others.iter().map(|a| dims[*a]).collect();
    flat.push(n.saturating_mul(n));
    let moved = cx.reshape(moved, flat.clone())?;
    let mut cut = Slice { start: vec![0; flat.len()], step: vec![1; flat.len()], size: flat };
    let last = others.len();
    (cut.size[last], cut.step[last]) = (n, n as isize + 1);
    let value = cx.emit(Op::Slice(cut), &[moved])?;
    let labels = others.iter().map(|a| term.labels[*a]).chain([term.labels[i]]).collect();
    diagonal(cx, Term { value, labels })
}

/// Checks that a label has one size, and broadcasts axes of size 1 where it is larger elsewhere.
fn broadcast_sizes(cx: &mut NodeContext<'_>, terms: &mut [Term]) -> Result<(), Fault> {
    let mut sizes = HashMap::new();
    for term in terms.iter() {
        for (label, d) in term.labels.iter().zip(cx.dims(term.value)) {
            let size = sizes.entry(*label).or_insert(d);
            if *size != d && *size != 1 && d != 1 {
                return misfit(format!("an axis has sizes {size} and {d} in different operands"));
            }
            *size = if *size == 1 { d } else { *size };
        }
    }
    for term in terms.iter_mut() {
        let dims = term.labels.iter().map(|l| sizes[l]).collect();
        term.value = cx.expand(term.value, dims)?;
    }
    Ok(())
}

/// Sums over the labels that nothing needs.
fn sum_out(
    cx: &mut NodeContext<'_>,
    term: Term,
    needed: &dyn Fn(u32) -> bool,
) -> Result<Term, Fault> {
    let axes: Vec<usize> = (0..term.labels.len()).filter(|&i| !needed(term.labels[i])).collect();
    if axes.is_empty() {
        return Ok(term);
    }
    let reduce = Reduce { f: ReduceFn::Sum, axes, keep_dims: false };
    let value = cx.emit(Op::Reduce(reduce), &[term.value])?;
    let labels = term.labels.into_iter().filter(|l| needed(*l)).collect();
    Ok(Term { value, labels })
}

/// The product of two terms, summed over what only they have and nothing else needs.
fn product(
    cx: &mut NodeContext<'_>,
    a: Term,
    b: Term,
    needed: &dyn Fn(u32) -> bool,
) -> Result<Term, Fault> {
    let a = sum_out(cx, a, &|l| b.labels.contains(&l) || needed(l))?;
    let b = sum_out(cx, b, &|l| a.labels.contains(&l) || needed(l))?;
    let both = |l: &u32| a.labels.contains(l) && b.labels.contains(l);
    let of = |t: &Term, f: &dyn Fn(&u32) -> bool| -> Vec<u32> {
        t.labels.iter().copied().filter(|l| f(l)).collect()
    };
    let batch = of(&a, &|l| both(l) && needed(*l));
    let contracted = of(&a, &|l| both(l) && !needed(*l));
    let (free_a, free_b) = (of(&a, &|l| !both(l)), of(&b, &|l| !both(l)));
    let sizes = |cx: &NodeContext<'_>, t: &Term, labels: &[u32]| -> Vec<usize> {
        let dims = cx.dims(t.value);
        positions(labels, &t.labels).into_iter().map(|i| dims[i]).collect()
    };
    let (batch_sizes, a_sizes) = (sizes(cx, &a, &batch), sizes(cx, &a, &free_a));
    let (b_sizes, k_sizes) = (sizes(cx, &b, &free_b), sizes(cx, &a, &contracted));
    let mut labels = batch.clone();
    labels.extend(free_a.iter().chain(&free_b));
    let shape: Vec<usize> = [&batch_sizes[..], &a_sizes, &b_sizes].concat();
    let order = |parts: [&[u32]; 3], t: &Term| positions(&parts.concat(), &t.labels);
    if contracted.is_empty() {
        // No sum: a broadcast product of [batch, free a, 1…] and [batch, 1…, free b].
        let left = permute(cx, a.value, order([&batch, &free_a, &[]], &a))?;
        let right = permute(cx, b.value, order([&batch, &free_b, &[]], &b))?;
        let ones = |n: usize| vec![1; n];
        let left = cx.reshape(left, [&batch_sizes[..], &a_sizes, &ones(b_sizes.len())].concat())?;
        let right =
            cx.reshape(right, [&batch_sizes[..], &ones(a_sizes.len()), &b_sizes].concat())?;
        let value = cx.emit(Op::Binary(BinaryFn::Mul), &[left, right])?;
        return Ok(Term { value, labels });
    }
    let left = permute(cx, a.value, order([&batch, &free_a, &contracted], &a))?;
    let right = permute(cx, b.value, order([&batch, &free_b, &contracted], &b))?;
    let count = numel;
    let matrix = |rows: &[usize]| [&batch_sizes[..], &[count(rows), count(&k_sizes)]].concat();
    let left = cx.reshape(left, matrix(&a_sizes))?;
    let right = cx.reshape(right, matrix(&b_sizes))?;
    let op = MatMul { trans_a: false, trans_b: true, out: None };
    let value = cx.emit(Op::MatMul(op), &[left, right])?;
    let value = cx.reshape(value, shape)?;
    Ok(Term { value, labels })
}
