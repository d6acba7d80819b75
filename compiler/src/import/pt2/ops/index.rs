//! Operators that read or write by index.

use super::super::call::{Call, Fault, Outcome, int, text, unsupported};
use super::super::dtype::{BOOL, I32, I64, Weight, is_float, promoted};
use super::super::symbols::{self, Function};
use super::super::translate::{Int, Tensor};
use super::{Convert, one};

pub(super) const OPERATORS: &[(&str, Convert)] = &[
    ("argwhere", nonzero),
    ("bucketize", |c| {
        let (x, edges) = (c.tensor("self")?, c.tensor("boundaries")?);
        sorted_place(c, &x, &edges)
    }),
    ("embedding", embedding),
    ("gather", gather),
    ("index", index),
    ("index_add", |c| written(c, "add")),
    ("index_copy", |c| written(c, "none")),
    ("index_fill", |c| written(c, "none")),
    ("index_put", index_put),
    ("index_select", index_select),
    ("isin", |c| {
        let name = |many, one| if c.argument(many).is_some() { many } else { one };
        let names = (name("elements", "element"), name("test_elements", "test_element"));
        let (x, all) = (c.operand(names.0)?, c.operand(names.1)?);
        let (a, b) = (x.weighted(), all.weighted());
        let dtype = promoted(&[a, b]);
        let (x, all) = (c.operand_as(&x, dtype), c.operand_as(&all, dtype));
        let (x, all) = (c.unsqueeze(&x, &[-1]), c.reshape(&all, &[Int::Known(-1)]));
        let same = c.add("Equal", &[&x, &all]);
        let same = c.cast(&same, BOOL, I64);
        let found = c.reduce("ReduceMax", &same, &[-1], false);
        let found = c.cast(&found, I64, BOOL);
        one(if c.bool("invert", false)? { c.add("Not", &[&found]) } else { found })
    }),
    ("masked_scatter", masked_scatter),
    ("masked_select", masked_select),
    ("nonzero", nonzero),
    ("nonzero_numpy", places),
    ("one_hot", one_hot),
    ("scatter", scatter),
    ("scatter_add", scatter),
    ("scatter_reduce", scatter),
    ("searchsorted", |c| {
        let (x, edges) = (c.tensor("self")?, c.tensor("sorted_sequence")?);
        sorted_place(c, &x, &edges)
    }),
    ("select_scatter", select_scatter),
    ("slice_scatter", slice_scatter),
    ("take", |c| {
        let (x, index) = (c.tensor("self")?, c.tensor("index")?);
        let flat = c.reshape(&x.name, &[Int::Known(-1)]);
        one(c.with("Gather", &[&flat, &index.name], vec![int("axis", 0)]))
    }),
    ("take_along_dim", take_along),
];

fn embedding(c: &mut Call<'_>) -> Outcome {
    if c.bool("scale_grad_by_freq", false)? {
        return unsupported("scale_grad_by_freq");
    }
    let (table, ids) = (c.tensor("weight")?, c.tensor("indices")?);
    let padding = c.int("padding_idx", -1)?;
    let y = c.with("Gather", &[&table.name, &ids.name], vec![int("axis", 0)]);
    if padding >= 0 {
        c.note_call(&format!("embedding.default](args = (_, _, {padding})"));
    }
    one(y)
}

fn gather(c: &mut Call<'_>) -> Outcome {
    let (x, index) = (c.tensor("self")?, c.tensor("index")?);
    if index.dims.len() != x.dims.len() {
        return unsupported("an index of another rank");
    }
    if x.dims.is_empty() {
        return one(x.name);
    }
    let axis = c.axis(c.int("dim", 0)?, x.dims.len())?;
    one(c.with("GatherElements", &[&x.name, &index.name], vec![int("axis", axis as i64)]))
}

/// Elements by an index that broadcasts with the operand along the other axes.
fn take_along(c: &mut Call<'_>) -> Outcome {
    let (x, index) = (c.tensor("self")?, c.tensor("indices")?);
    let Some(axis) = c.int_given("dim")? else {
        let (x, index) =
            (c.reshape(&x.name, &[Int::Known(-1)]), c.reshape(&index.name, &[Int::Known(-1)]));
        return one(c.with("GatherElements", &[&x, &index], vec![int("axis", 0)]));
    };
    if index.dims.len() != x.dims.len() {
        return unsupported("an index of another rank");
    }
    let axis = c.axis(axis.known().unwrap_or(0), x.dims.len())?;
    let wider = |c: &mut Call<'_>, t: &Tensor, other: &Tensor| {
        if t.dims == other.dims && t.dims.iter().all(Option::is_some) {
            return t.name.clone();
        }
        let mut sizes = c.shape(other);
        sizes[axis] = Int::Known(1);
        let shape = c.size_list(&sizes);
        c.add("Expand", &[&t.name, &shape])
    };
    let (all, places) = (wider(c, &x, &index), wider(c, &index, &x));
    one(c.with("GatherElements", &[&all, &places], vec![int("axis", axis as i64)]))
}

/// Slices of an axis added, or replaced, at the places of an index.
fn written(c: &mut Call<'_>, how: &str) -> Outcome {
    let (x, index) = (c.tensor("self")?, c.tensor("index")?);
    let rank = x.dims.len();
    if rank == 0 || index.dims.len() > 1 {
        return unsupported("an operand without axes, or an index of several");
    }
    let axis = c.axis(c.int("dim", 0)?, rank)?;
    let count = if index.dims.is_empty() { Int::Known(1) } else { c.size_of(&index, 0) };
    let mut sizes = c.shape(&x);
    sizes[axis] = count;
    let shape = c.size_list(&sizes);
    let source = match c.argument("source") {
        Some(_) => {
            let source = c.tensor("source")?;
            let source = c.cast(&source.name, source.dtype, x.dtype);
            super::pointwise::scaled(c, &source, x.dtype, "alpha")?
        }
        None => {
            let value = c.operand("value")?;
            let value = c.operand_as(&value, x.dtype);
            c.add("Expand", &[&value, &shape])
        }
    };
    let mut along = vec![Int::Known(1); rank];
    along[axis] = Int::Known(-1);
    let places = c.reshape(&index.name, &along);
    let places = c.add("Expand", &[&places, &shape]);
    let attributes = vec![int("axis", axis as i64), text("reduction", how)];
    one(c.with("ScatterElements", &[&x.name, &places, &source], attributes))
}

/// Elements of a source, in their order, where a mask is true.
fn masked_scatter(c: &mut Call<'_>) -> Outcome {
    let (x, mask, source) = (c.tensor("self")?, c.tensor("mask")?, c.tensor("source")?);
    let of_mask = c.add("Shape", &[&mask.name]);
    let x = c.add("Expand", &[&x.name, &of_mask]);
    let shape = c.add("Shape", &[&x]);
    let mask = c.add("Expand", &[&mask.name, &shape]);
    let all = c.add("NonZero", &[&mask]);
    let all = c.transpose(&all, &[1, 0]);
    let count = c.with("Shape", &[&all], vec![int("start", 0), int("end", 1)]);
    let flat = c.reshape(&source.name, &[Int::Known(-1)]);
    let zero = c.list(&[0]);
    let source = c.add("Slice", &[&flat, &zero, &count, &zero]);
    one(c.add("ScatterND", &[&x, &all, &source]))
}

/// How many edges, in ascending order along their last axis, each element is above, or not below with `right`.
fn sorted_place(c: &mut Call<'_>, x: &Tensor, edges: &Tensor) -> Outcome {
    if c.argument("sorter").is_some() {
        return unsupported("`sorter`");
    }
    let is_right = c.bool("right", false)? || c.text("side", "left")? == "right";
    let dtype = promoted(&[(x.dtype, Weight::Tensor), (edges.dtype, Weight::Tensor)]);
    let (x, edges) = (c.cast(&x.name, x.dtype, dtype), {
        let name = c.cast(&edges.name, edges.dtype, dtype);
        if edges.dims.len() > 1 { c.unsqueeze(&name, &[-2]) } else { name }
    });
    let x = c.unsqueeze(&x, &[-1]);
    let above = c.add(if is_right { "GreaterOrEqual" } else { "Greater" }, &[&x, &edges]);
    let above = c.cast(&above, BOOL, I64);
    let place = c.reduce("ReduceSum", &above, &[-1], false);
    let is_short = c.bool("out_int32", false)?;
    one(if is_short { c.cast(&place, I64, I32) } else { place })
}

fn index_select(c: &mut Call<'_>) -> Outcome {
    let (x, index) = (c.tensor("self")?, c.tensor("index")?);
    let axis = c.axis(c.int("dim", 0)?, x.dims.len())?;
    one(c.with("Gather", &[&x.name, &index.name], vec![int("axis", axis as i64)]))
}

/// Indices of axes, each with its axis. A mask stands for the coordinates of what it selects.
fn indices(c: &mut Call<'_>, x: &Tensor) -> Result<Vec<(usize, Tensor)>, Fault> {
    let given = c.optionals("indices")?;
    let mut axis = 0;
    let mut all = vec![];
    for index in given {
        match index {
            Some(mask) if mask.dtype == BOOL => {
                let rows = coordinates(c, &mask);
                all.extend(rows.into_iter().enumerate().map(|(i, row)| (axis + i, row)));
                axis += mask.dims.len();
                continue;
            }
            Some(index) => all.push((axis, index)),
            None => {}
        }
        axis += 1;
    }
    match axis > x.dims.len() {
        true => Err(Fault::Damaged(format!("{axis} indices of rank {}", x.dims.len()))),
        false => Ok(all),
    }
}

/// The coordinates of the elements of a mask that are true, a row for each axis.
fn coordinates(c: &mut Call<'_>, mask: &Tensor) -> Vec<Tensor> {
    let all = c.add("NonZero", &[&mask.name]);
    let row = |c: &mut Call<'_>, axis: usize| {
        let axis = c.integer(axis as i64);
        let name = c.with("Gather", &[&all, &axis], vec![int("axis", 0)]);
        Tensor { name, dtype: I64, dims: vec![None] }
    };
    (0..mask.dims.len()).map(|axis| row(c, axis)).collect()
}

/// The coordinates of the elements that are not zero, a row for each.
fn nonzero(c: &mut Call<'_>) -> Outcome {
    let x = c.tensor("self")?;
    let all = c.add("NonZero", &[&x.name]);
    one(c.transpose(&all, &[1, 0]))
}

fn masked_select(c: &mut Call<'_>) -> Outcome {
    let (x, mask) = (c.tensor("self")?, c.tensor("mask")?);
    if x.dims.len() != mask.dims.len() {
        return unsupported("a mask of another rank");
    }
    let shape = c.add("Shape", &[&x.name]);
    let mask = c.add("Expand", &[&mask.name, &shape]);
    let all = c.add("NonZero", &[&mask]);
    let all = c.transpose(&all, &[1, 0]);
    one(c.add("GatherND", &[&x.name, &all]))
}

/// The coordinates of the elements that are not zero, a tensor for each axis.
pub(super) fn places(c: &mut Call<'_>) -> Outcome {
    let x = c.tensor(if c.op == "where" { "condition" } else { "self" })?;
    Ok(coordinates(c, &x).into_iter().map(|row| row.name).collect())
}

/// Indices of several axes, broadcast against each other, `[…, axes]`.
fn joined(c: &mut Call<'_>, indices: &[(usize, Tensor)]) -> String {
    let zero = c.integer(0);
    let wide: Vec<String> = indices.iter().map(|(_, t)| c.cast(&t.name, t.dtype, I64)).collect();
    // Zeros in the common shape.
    let mut zeros: Option<String> = None;
    for name in &wide {
        let own = c.add("Mul", &[name, &zero]);
        zeros = Some(match zeros {
            Some(all) => c.add("Add", &[&all, &own]),
            None => own,
        });
    }
    let zeros = zeros.unwrap_or(zero);
    let parts: Vec<String> = wide
        .iter()
        .map(|name| {
            let all = c.add("Add", &[name, &zeros]);
            c.unsqueeze(&all, &[-1])
        })
        .collect();
    let parts: Vec<&str> = parts.iter().map(String::as_str).collect();
    c.with("Concat", &parts, vec![int("axis", -1)])
}

/// Rank of what indices are broadcast to.
fn rank_of(indices: &[(usize, Tensor)]) -> usize {
    indices.iter().map(|(_, t)| t.dims.len()).max().unwrap_or(0)
}

fn index(c: &mut Call<'_>) -> Outcome {
    let x = c.tensor("self")?;
    let indices = indices(c, &x)?;
    match &indices[..] {
        [] => return one(x.name),
        [(axis, t)] => {
            return one(c.with("Gather", &[&x.name, &t.name], vec![int("axis", *axis as i64)]));
        }
        _ => {}
    }
    let rank = x.dims.len();
    let axes: Vec<usize> = indices.iter().map(|(axis, _)| *axis).collect();
    let rest: Vec<usize> = (0..rank).filter(|a| !axes.contains(a)).collect();
    let perm = [&axes[..], &rest].concat();
    let in_order = perm.iter().enumerate().all(|(i, p)| i == *p);
    let turned = if in_order { x.name.clone() } else { c.transpose(&x.name, &perm) };
    let all = joined(c, &indices);
    let y = c.add("GatherND", &[&turned, &all]);
    // The axes of neighboring indices stay in their place; those of others go to the front.
    let adjacent = axes.windows(2).all(|w| w[1] == w[0] + 1);
    let (n, first) = (rank_of(&indices), axes[0]);
    if !adjacent || first == 0 || rest.is_empty() {
        return one(y);
    }
    let place: Vec<usize> = (n..n + first).chain(0..n).chain(n + first..n + rest.len()).collect();
    one(c.transpose(&y, &place))
}

fn index_put(c: &mut Call<'_>) -> Outcome {
    let (x, values) = (c.tensor("self")?, c.tensor("values")?);
    let accumulates = c.bool("accumulate", false)?;
    let given = c.optionals("indices")?;
    let mut masks = given.iter().enumerate().filter_map(|(axis, t)| Some((axis, t.as_ref()?)));
    if let (Some((axis, mask)), None) = (masks.next(), masks.next())
        && mask.dtype == BOOL
        && !accumulates
        && values.dims.iter().all(|d| *d == Some(1))
    {
        let behind = x.dims.len().saturating_sub(axis + mask.dims.len());
        let axes: Vec<i64> = (0..behind).map(|i| -1 - i as i64).collect();
        let keep = if behind == 0 { mask.name.clone() } else { c.unsqueeze(&mask.name, &axes) };
        let value = c.cast(&values.name, values.dtype, x.dtype);
        let value = c.reshape(&value, &[]);
        return one(c.add("Where", &[&keep, &value, &x.name]));
    }
    let indices = indices(c, &x)?;
    let rank = x.dims.len();
    let axes: Vec<usize> = indices.iter().map(|(axis, _)| *axis).collect();
    let Some(first) = axes.first().copied() else {
        return unsupported("writing without indices");
    };
    // The axes with indices are brought to the front, and what is written has those of the indices there.
    let rest: Vec<usize> = (0..rank).filter(|a| !axes.contains(a)).collect();
    let perm = [&axes[..], &rest].concat();
    let turned = if perm.is_sorted() { x.name.clone() } else { c.transpose(&x.name, &perm) };
    let all = joined(c, &indices);
    let n = rank_of(&indices);
    let front = match axes.windows(2).all(|w| w[1] == w[0] + 1) {
        true => first,
        false => 0,
    };
    // The values in the shape of what is written.
    let common = c.with("Shape", &[&all], vec![int("start", 0), int("end", n as i64)]);
    let others = c.with("Shape", &[&turned], vec![int("start", indices.len() as i64)]);
    let (end, last) = (c.list(&[front as i64]), c.list(&[i64::MAX]));
    let zero = c.list(&[0]);
    let before = c.add("Slice", &[&others, &zero, &end]);
    let after = c.add("Slice", &[&others, &end, &last]);
    let shape = c.with("Concat", &[&before, &common, &after], vec![int("axis", 0)]);
    let values = c.cast(&values.name, values.dtype, x.dtype);
    let mut values = c.add("Expand", &[&values, &shape]);
    if front > 0 {
        let order = (front..front + n).chain(0..front).chain(front + n..n + rest.len());
        values = c.transpose(&values, &order.collect::<Vec<_>>());
    }
    let how = if accumulates { "add" } else { "none" };
    let y = c.with("ScatterND", &[&turned, &all, &values], vec![text("reduction", how)]);
    if perm.is_sorted() {
        return one(y);
    }
    let mut back = vec![0; rank];
    for (to, from) in perm.iter().enumerate() {
        back[*from] = to;
    }
    one(c.transpose(&y, &back))
}

fn one_hot(c: &mut Call<'_>) -> Outcome {
    let x = c.tensor("self")?;
    let n = c.int("num_classes", -1)?;
    if n < 1 {
        return unsupported("a number of classes that depends on data");
    }
    let (n, values) = (c.integer(n), c.list(&[0, 1]));
    one(c.with("OneHot", &[&x.name, &n, &values], vec![int("axis", -1)]))
}

fn scatter(c: &mut Call<'_>) -> Outcome {
    let (x, index) = (c.tensor("self")?, c.tensor("index")?);
    if x.dims.is_empty() {
        return unsupported("an operand without axes");
    }
    let axis = c.axis(c.int("dim", 0)?, x.dims.len())?;
    let how = match (c.op, c.text("reduce", "")?.as_str()) {
        ("scatter_add", _) | (_, "add" | "sum") => "add",
        (_, "multiply" | "prod") => "mul",
        (_, "amax") => "max",
        (_, "amin") => "min",
        (_, "mean") => "mean",
        (_, "") => "none",
        (_, other) => return unsupported(format!("reduce = \"{other}\"")),
    };
    let sizes = c.shape(&index);
    let shape = c.size_list(&sizes);
    let source = match c.optional("src").ok().flatten() {
        Some(source) => {
            let name = c.cast(&source.name, source.dtype, x.dtype);
            if source.dims == index.dims && source.dims.iter().all(Option::is_some) {
                name
            } else {
                // Elements beyond the index are not read.
                let rank = source.dims.len() as i64;
                let zeros = c.list(&vec![0; rank as usize]);
                let axes = c.list(&(0..rank).collect::<Vec<_>>());
                c.add("Slice", &[&name, &zeros, &shape, &axes])
            }
        }
        None => {
            let value = c.operand("value")?;
            let value = c.operand_as(&value, x.dtype);
            c.add("Expand", &[&value, &shape])
        }
    };
    let includes = c.bool("include_self", true)?;
    let attributes = |how: &str| vec![int("axis", axis as i64), text("reduction", how)];
    if includes && how != "mean" {
        let all = [x.name.as_str(), &index.name, &source];
        return one(c.with("ScatterElements", &all, attributes(how)));
    }
    // How many are written to each place; with what is there before, or what changes nothing instead.
    let sizes = c.shape(&x);
    let none = c.full(&sizes, x.dtype, 0.0);
    let more = c.number(x.dtype, 1.0);
    let ones = c.add("Expand", &[&more, &shape]);
    let count = c.with("ScatterElements", &[&none, &index.name, &ones], attributes("add"));
    let zero = c.number(x.dtype, 0.0);
    let is_written = c.add("Greater", &[&count, &zero]);
    let start = if includes {
        x.name.clone()
    } else {
        let neutral = match how {
            "mul" => 1.0,
            "max" => f64::NEG_INFINITY,
            "min" => f64::INFINITY,
            _ => 0.0,
        };
        if neutral.is_infinite() && !is_float(x.dtype) {
            return unsupported("include_self = False of integers");
        }
        let neutral = c.number(x.dtype, neutral);
        c.add("Where", &[&is_written, &neutral, &x.name])
    };
    let f = if how == "mean" { "add" } else { how };
    let total = c.with("ScatterElements", &[&start, &index.name, &source], attributes(f));
    if how != "mean" {
        return one(total);
    }
    let count =
        if includes { c.add("Add", &[&count, &more]) } else { c.add("Max", &[&count, &more]) };
    one(c.add("Div", &[&total, &count]))
}

/// The tensor with what lies from `start` to `end` of an axis replaced.
fn replaced(
    c: &mut Call<'_>,
    x: &Tensor,
    axis: usize,
    [start, end]: [&Int; 2],
    new: &str,
) -> String {
    let axes = c.list(&[axis as i64]);
    let (zero, most) = (c.list(&[0]), c.list(&[i64::MAX]));
    let (start, end) =
        (c.size_list(std::slice::from_ref(start)), c.size_list(std::slice::from_ref(end)));
    let before = c.add("Slice", &[&x.name, &zero, &start, &axes]);
    let after = c.add("Slice", &[&x.name, &end, &most, &axes]);
    c.with("Concat", &[&before, new, &after], vec![int("axis", axis as i64)])
}

/// An index from the front.
fn from_front(c: &mut Call<'_>, index: Int, size: &Int) -> Result<Int, Fault> {
    match (index.known(), size.known()) {
        (Some(i), Some(n)) => {
            Ok(Int::Known(if i < 0 { i.saturating_add(n).max(0) } else { i.min(n) }))
        }
        (Some(i), None) if i < 0 => symbols::of(c, Function::Add, &index, size),
        (Some(i64::MAX), None) => Ok(size.clone()),
        _ => Ok(index),
    }
}

fn slice_scatter(c: &mut Call<'_>) -> Outcome {
    let (x, source) = (c.tensor("self")?, c.tensor("src")?);
    let axis = c.axis(c.int("dim", 0)?, x.dims.len())?;
    if c.int("step", 1)? != 1 {
        return unsupported("a step");
    }
    let size = c.size_of(&x, axis);
    let start = c.int_given("start")?.unwrap_or(Int::Known(0));
    let end = c.int_given("end")?.unwrap_or(Int::Known(i64::MAX));
    let (start, end) = (from_front(c, start, &size)?, from_front(c, end, &size)?);
    let new = c.cast(&source.name, source.dtype, x.dtype);
    let y = replaced(c, &x, axis, [&start, &end], &new);
    one(y)
}

fn select_scatter(c: &mut Call<'_>) -> Outcome {
    let (x, source) = (c.tensor("self")?, c.tensor("src")?);
    let axis = c.axis(c.int("dim", 0)?, x.dims.len())?;
    let size = c.size_of(&x, axis);
    let start = c.int_given("index")?.unwrap_or(Int::Known(0));
    let start = from_front(c, start, &size)?;
    let end = symbols::of(c, Function::Add, &start, &Int::Known(1))?;
    let new = c.cast(&source.name, source.dtype, x.dtype);
    let new = c.unsqueeze(&new, &[axis as i64]);
    let y = replaced(c, &x, axis, [&start, &end], &new);
    one(y)
}
