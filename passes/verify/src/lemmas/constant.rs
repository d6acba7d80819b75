//! Constants: as numbers and arithmetic of indices where they are regular, else as leaves.

use crate::algebra::LOWEST;
use crate::index::Ix;
use crate::term::{Algebra, SAME_NUMBER, Term, TermId, Terms, is_rounded};
use frit_ir::{DType, Tensor};

/// More elements are not searched for a pattern.
const SEARCHED: usize = 1 << 24;

/// The element of a constant over its axes.
pub(crate) fn constant(t: &mut Terms, tensor: &Tensor) -> TermId {
    if t.algebra == Algebra::Bits || !is_exact(tensor) {
        return of_bits(t, tensor);
    }
    if let Some(x) = tensor.as_splat() {
        let dtype = tensor.dtype();
        let x = if dtype.is_low_precision() { t.unrounded(x, dtype) } else { x };
        return t.constant(x);
    }
    let sizes = tensor.shape().dims().to_vec();
    // Masks exclude by −∞ and by the least number of a dtype, also both in one.
    let lowest = |x: f64| if x <= LOWEST { f64::NEG_INFINITY } else { x };
    let values: Vec<f64> = tensor.to_f64s().into_iter().map(lowest).collect();
    if values.is_empty() || values.len() > SEARCHED {
        let axes = t.axes(&sizes);
        return leaf(t, tensor.dtype(), &sizes, values, &axes);
    }
    if let Some(term) = mask(t, tensor.dtype(), &sizes, &values) {
        return term;
    }
    of_values(t, tensor.dtype(), &sizes, values)
}

/// Whether its elements are numbers of 64 bits.
fn is_exact(tensor: &Tensor) -> bool {
    tensor.dtype().is_float() || tensor.to_i64s().iter().all(|x| x.unsigned_abs() < 1 << 53)
}

/// The element of a constant, with every bit of it. Integers are also arithmetic of indices.
fn of_bits(t: &mut Terms, tensor: &Tensor) -> TermId {
    let (dtype, sizes) = (tensor.dtype(), tensor.shape().dims().to_vec());
    let values = tensor.to_f64s();
    let first = values.first().copied().unwrap_or(0.0);
    let is_splat = values.iter().all(|x| x.to_bits() == first.to_bits());
    match () {
        () if values.is_empty() || !is_exact(tensor) => {
            let axes = t.axes(&sizes);
            let bytes = tensor.to_bytes();
            let key = format!("constant {dtype} {sizes:?} {bytes:?}");
            let leaf = t.typed_leaf(&key, dtype);
            t.term(Term::Leaf(leaf, axes.into()))
        }
        () if is_splat && dtype.is_float() => t.literal(first),
        () if is_splat => t.constant(first),
        () if values.len() <= SEARCHED && !dtype.is_float() => of_values(t, dtype, &sizes, values),
        () => {
            let (sizes, axes, values) = without_repeats(t, &sizes, values);
            leaf(t, dtype, &sizes, values, &axes)
        }
    }
}

/// The element of a tensor of these truth values.
pub(crate) fn truths_of_values(t: &mut Terms, sizes: &[usize], values: Vec<f64>) -> TermId {
    of_values(t, DType::Bool, sizes, values)
}

/// The element of a tensor of these scores, of which some may be −∞.
pub(crate) fn scores_of_values(t: &mut Terms, sizes: &[usize], values: Vec<f64>) -> TermId {
    let masked = mask(t, DType::F32, sizes, &values);
    masked.unwrap_or_else(|| of_values(t, DType::F32, sizes, values))
}

/// The element of a tensor of these values.
fn of_values(t: &mut Terms, dtype: DType, sizes: &[usize], values: Vec<f64>) -> TermId {
    let (sizes, axes, values) = without_repeats(t, sizes, values);
    if let Some(term) = ramp(t, &sizes, &axes, &values) {
        return term;
    }
    if let Some(term) = band(t, &sizes, &axes, &values) {
        return term;
    }
    if dtype.is_float() {
        return without_padding(t, dtype, sizes, &axes, values);
    }
    // Of truth values and their negation one is a leaf.
    if dtype == DType::Bool && values[0] != 0.0 {
        let negated = values.iter().map(|x| 1.0 - x).collect();
        let negated = leaf(t, dtype, &sizes, negated, &axes);
        return t.not(negated);
    }
    leaf(t, dtype, &sizes, values, &axes)
}

/// The element of a tensor that ends with zeros along some axes, as a padded one does: of what is before them.
fn without_padding(
    t: &mut Terms,
    dtype: DType,
    mut sizes: Vec<usize>,
    axes: &[Ix],
    mut values: Vec<f64>,
) -> TermId {
    let mut factors = vec![];
    for k in 0..sizes.len() {
        let (n, inner) = (sizes[k], sizes[k + 1..].iter().product::<usize>());
        // The last index along the axis at which an element is not 0.
        let place = |i: usize| i / inner % n;
        let others = values.iter().enumerate().filter(|(_, x)| **x != 0.0);
        let Some(last) = others.map(|(i, _)| place(i)).max() else { return t.constant(0.0) };
        if last + 1 == n {
            continue;
        }
        let kept = values.iter().enumerate().filter(|(i, _)| place(*i) <= last);
        values = kept.map(|(_, x)| *x).collect();
        sizes[k] = last + 1;
        let behind = t.times(axes[k], -1);
        let before = t.offset(behind, last as i64);
        factors.push((t.index_not_negative(before), 1.0));
    }
    factors.push((leaf(t, dtype, &sizes, values, axes), 1.0));
    t.product(&factors)
}

/// A constant that is −∞ in places: a choice of −∞ and what it is in others, as of a mask that was added to it.
fn mask(t: &mut Terms, dtype: DType, sizes: &[usize], values: &[f64]) -> Option<TermId> {
    let is_kept = |x: &f64| *x != f64::NEG_INFINITY;
    if values.iter().all(is_kept) || !values.iter().any(is_kept) {
        return None;
    }
    let truths = values.iter().map(|x| f64::from(is_kept(x))).collect();
    let condition = truths_of_values(t, sizes, truths);
    let inside = of_values(t, dtype, sizes, continued(sizes, values));
    let lowest = t.constant(f64::NEG_INFINITY);
    Some(t.select(condition, inside, lowest))
}

/// The values, with those of other elements of the same line in place of −∞, along each axis along which lines have one value besides;
/// then 0.
fn continued(sizes: &[usize], values: &[f64]) -> Vec<f64> {
    let mut values = values.to_vec();
    for k in (0..sizes.len()).rev() {
        let inner: usize = sizes[k + 1..].iter().product();
        let lines: Vec<usize> =
            (0..values.len()).filter(|i| (i / inner).is_multiple_of(sizes[k])).collect();
        let of_line = |values: &[f64], start: usize| {
            let line = (0..sizes[k]).map(|i| values[start + i * inner]);
            let mut kept = line.filter(|x| *x != f64::NEG_INFINITY);
            let first = kept.next().unwrap_or(f64::NEG_INFINITY);
            kept.all(|x| x.to_bits() == first.to_bits()).then_some(first)
        };
        let found: Option<Vec<f64>> = lines.iter().map(|i| of_line(&values, *i)).collect();
        for (start, value) in lines.iter().zip(found.unwrap_or_default()) {
            (0..sizes[k]).for_each(|i| values[start + i * inner] = value);
        }
    }
    values.into_iter().map(|x| if x == f64::NEG_INFINITY { 0.0 } else { x }).collect()
}

/// The axes along which elements differ.
fn without_repeats(
    t: &mut Terms,
    sizes: &[usize],
    values: Vec<f64>,
) -> (Vec<usize>, Vec<Ix>, Vec<f64>) {
    let (mut sizes, mut axes) = (sizes.to_vec(), t.axes(sizes));
    let mut values = values;
    for k in (0..sizes.len()).rev() {
        let n = sizes[k];
        let inner: usize = sizes[k + 1..].iter().product();
        let block = n * inner;
        let repeats = values.chunks(block).all(|block| {
            block
                .chunks(inner)
                .all(|row| row.iter().zip(&block[..inner]).all(|(a, b)| a.to_bits() == b.to_bits()))
        });
        if repeats {
            values = values.chunks(block).flat_map(|block| block[..inner].to_vec()).collect();
            sizes.remove(k);
            axes.remove(k);
        }
    }
    (sizes, axes, values)
}

/// Whole numbers that are sums of multiples of the indices.
fn ramp(t: &mut Terms, sizes: &[usize], axes: &[Ix], values: &[f64]) -> Option<TermId> {
    let first = values[0];
    let mut steps = vec![];
    let mut inner: usize = values.len();
    for &n in sizes {
        inner /= n;
        steps.push(values[inner] - first);
    }
    if [&steps[..], &[first]].concat().iter().any(|x| x.fract() != 0.0 || x.abs() > 1e9) {
        return None;
    }
    let mut at = vec![0_usize; sizes.len()];
    for &value in values {
        let expected: f64 = first + at.iter().zip(&steps).map(|(i, s)| *i as f64 * s).sum::<f64>();
        if expected != value {
            return None;
        }
        for k in (0..sizes.len()).rev() {
            at[k] += 1;
            if at[k] < sizes[k] {
                break;
            }
            at[k] = 0;
        }
    }
    let mut sum = t.constant_index(first as i64);
    for (ix, step) in axes.iter().zip(steps) {
        let part = t.times(*ix, step as i64);
        sum = t.plus(sum, part);
    }
    Some(t.index_term(sum))
}

/// A matrix of two values, one where the difference of both indices is in an interval.
fn band(t: &mut Terms, sizes: &[usize], axes: &[Ix], values: &[f64]) -> Option<TermId> {
    let &[rows, columns] = sizes else { return None };
    let corner = values[0];
    let other = *values.iter().find(|x| **x != corner)?;
    let mut kinds: Vec<Option<bool>> = vec![None; rows + columns - 1];
    for (place, value) in values.iter().enumerate() {
        let (i, j) = (place / columns, place % columns);
        let is = if *value == corner {
            true
        } else if *value == other {
            false
        } else {
            return None;
        };
        let kind = &mut kinds[i + columns - 1 - j];
        if kind.is_some_and(|k| k != is) {
            return None;
        }
        *kind = Some(is);
    }
    // The diagonals on which the corner's value is.
    let inside = |k: usize| kinds[k] == Some(true);
    let first = (0..kinds.len()).find(|k| inside(*k))?;
    let last = (0..kinds.len()).rev().find(|k| inside(*k))?;
    if (first..=last).any(|k| !inside(k)) {
        return None;
    }
    let minus = t.times(axes[1], -1);
    let difference = t.plus(axes[0], minus);
    let low = t.offset(difference, columns as i64 - 1 - first as i64);
    let minus = t.times(difference, -1);
    let high = t.offset(minus, last as i64 - (columns as i64 - 1));
    let (low, high) = (t.index_not_negative(low), t.index_not_negative(high));
    let both = t.mul(low, high);
    let (a, b) = (t.constant(corner), t.constant(other));
    Some(t.select(both, a, b))
}

/// Whether elements of constants of two dtypes are the same number, each rounded to its dtype.
fn is_same((a, of_a): (f64, DType), (b, of_b): (f64, DType)) -> bool {
    if a == b || (a.is_nan() && b.is_nan()) {
        return true;
    }
    match (of_a.is_low_precision(), of_b.is_low_precision()) {
        (false, false) => (a - b).abs() <= SAME_NUMBER * a.abs().max(b.abs()),
        (false, true) => is_rounded(a, b, of_b),
        (true, false) => is_rounded(b, a, of_a),
        (true, true) => of_a != of_b && (is_rounded(a, b, of_b) || is_rounded(b, a, of_a)),
    }
}

/// A leaf for these elements: one of them, else one that was seen before and differs by no more than rounding; integers do not differ.
fn leaf(t: &mut Terms, dtype: DType, sizes: &[usize], values: Vec<f64>, axes: &[Ix]) -> TermId {
    let known = t.constants.entry(sizes.to_vec()).or_default();
    let bits = t.algebra == Algebra::Bits;
    let is_equal = |(seen, _): &&(Tensor, u32)| {
        seen.to_f64s().iter().zip(&values).all(|(a, b)| a.to_bits() == b.to_bits())
    };
    let is_near = |(seen, _): &&(Tensor, u32)| {
        let mut pairs = seen.to_f64s().into_iter().zip(&values);
        pairs.all(|(a, b)| is_same((a, seen.dtype()), (*b, dtype)))
    };
    let near = || known.iter().filter(|_| !bits && dtype.is_float()).find(is_near);
    let found = known.iter().find(is_equal).or_else(near);
    let leaf = match found {
        Some((_, leaf)) => *leaf,
        None => {
            let number: usize = t.constants.values().map(Vec::len).sum();
            let key = format!("constant {number}");
            let leaf = t.typed_leaf(&key, dtype);
            let kept = if dtype.is_float() && !bits { dtype } else { DType::F64 };
            let tensor = Tensor::floats(kept, sizes.to_vec(), values);
            t.constants.entry(sizes.to_vec()).or_default().push((tensor, leaf));
            leaf
        }
    };
    t.term(Term::Leaf(leaf, axes.into()))
}

#[cfg(test)]
mod tests {
    use crate::gradient::tests::add;
    use crate::{Comparer, Ranks};
    use frit_ir::ops::{BinaryFn, Constant, Input, Slice, Softmax};
    use frit_ir::{DType, Graph, Op, OutputKind, Tensor, TensorType};

    const N: usize = 4;

    /// A softmax of scores to which tensors `[heads, N, N]` are added.
    fn softmax(added: &[Vec<f64>]) -> Graph {
        let mut g = Graph::new("g");
        let ty = TensorType::new(DType::F32, [2, N, N]);
        let mut scores = add(&mut g, Op::Input(Input { name: "scores".into(), ty }), &[])[0];
        for values in added {
            let value = Tensor::floats(DType::F32, [2, N, N], values.clone());
            let value = add(&mut g, Op::Constant(Constant { value }), &[])[0];
            scores = add(&mut g, Op::Binary(BinaryFn::Add), &[scores, value])[0];
        }
        let weights = add(&mut g, Op::Softmax(Softmax { axis: 2 }), &[scores])[0];
        g.add_output("weights", weights, OutputKind::Gradient);
        g
    }

    fn table(element: impl Fn(usize, usize, usize) -> f64) -> Vec<f64> {
        (0..2 * N * N).map(|i| element(i / (N * N), i / N % N, i % N)).collect()
    }

    fn is_equal(a: &[Vec<f64>], b: &[Vec<f64>]) -> bool {
        Comparer::of_real_numbers().compare(&softmax(a), &softmax(b), Ranks::ONE).is_empty()
    }

    #[test]
    fn a_mask_may_be_added_to_positions_before() {
        let slope = |head: usize, key: usize| key as f64 * 0.3 / (head + 1) as f64;
        let sees = |row: usize, key: usize| key <= row && row - key < 3;
        let positions = table(|head, _, key| slope(head, key));
        for lowest in [f64::NEG_INFINITY, f64::from(f32::MIN)] {
            let mask = table(|_, row, key| if sees(row, key) { 0.0 } else { lowest });
            let both = |sees: &dyn Fn(usize, usize) -> bool| {
                table(|head, row, key| if sees(row, key) { slope(head, key) } else { lowest })
            };
            let parts = [positions.clone(), mask.clone()];
            assert!(is_equal(&parts, &[both(&sees)]));
            assert!(!is_equal(&parts, &[both(&|row, key| key <= row)]));
            assert!(!is_equal(&[mask], &[both(&sees)]));
        }
    }

    #[test]
    fn masks_may_be_added_or_joined() {
        let least = f64::from(f32::MIN);
        let of = |sees: &dyn Fn(usize, usize) -> bool| {
            table(|_, row, key| if sees(row, key) { 0.0 } else { least })
        };
        let causal = |row: usize, key: usize| key <= row;
        let column = |_: usize, key: usize| key != 2;
        let some = |row: usize, key: usize| (row * 3 + key) % 5 != 1;
        for other in [&column as &dyn Fn(usize, usize) -> bool, &some] {
            for first in [&causal as &dyn Fn(usize, usize) -> bool, &some] {
                let both = of(&|row, key| first(row, key) && other(row, key));
                assert!(is_equal(&[of(first), of(other)], std::slice::from_ref(&both)));
                assert!(is_equal(&[of(other), of(first)], std::slice::from_ref(&both)));
                let third = of(&|row, key| first(row, key) && other(row, key) && key < 3);
                assert!(!is_equal(&[of(first), of(other)], &[third]));
            }
        }
    }

    #[test]
    fn constants_may_be_added_to_scores_or_their_sum() {
        let least = f64::from(f32::MIN);
        let bias = |head: usize, row: usize, key: usize| ((head * 31 + row * 7 + key) as f64).sin();
        let other = |row: usize, key: usize| ((row * 3 + key * 5) as f64).cos();
        let mask = table(|_, row, key| if key <= row { 0.0 } else { least });
        let (first, second) = (table(bias), table(|_, row, key| other(row, key)));
        let sum = table(|head, row, key| bias(head, row, key) + other(row, key));
        assert!(is_equal(&[first.clone(), second.clone()], std::slice::from_ref(&sum)));
        assert!(!is_equal(&[first.clone(), second.clone()], std::slice::from_ref(&first)));
        let masked = |sees: &dyn Fn(usize, usize) -> bool| {
            table(|head, row, key| if sees(row, key) { bias(head, row, key) } else { least })
        };
        for order in [[first.clone(), mask.clone()], [mask.clone(), first.clone()]] {
            assert!(is_equal(&order, &[masked(&|row, key| key <= row)]));
            assert!(!is_equal(&order, &[masked(&|row, key| key < row || key == 0)]));
        }
        assert!(!is_equal(&[mask], &[masked(&|row, key| key <= row)]));
        // What is excluded by a number that remains one: −1e9 and what is added to it.
        let low = table(|_, row, key| if key <= row { 0.0 } else { -1e9 });
        let added = |first: &dyn Fn(usize, usize, usize) -> f64| {
            table(|head, row, key| first(head, row, key) + if key <= row { 0.0 } else { -1e9 })
        };
        assert!(is_equal(&[first.clone(), low.clone()], &[added(&bias)]));
        assert!(!is_equal(&[second, low], &[added(&bias)]));
    }

    #[test]
    fn a_table_may_be_padded_before_it_is_read() {
        let read = |rows: usize, element: &dyn Fn(usize, usize) -> f64| {
            let values = (0..rows * N).map(|i| element(i / N, i % N)).collect();
            let mut g = Graph::new("g");
            let ty = TensorType::new(DType::F32, [3, N]);
            let x = add(&mut g, Op::Input(Input { name: "x".into(), ty }), &[])[0];
            let value = Tensor::floats(DType::F32, [rows, N], values);
            let table = add(&mut g, Op::Constant(Constant { value }), &[])[0];
            let (start, size, step) = (vec![0, 0], vec![3, N], vec![1, 1]);
            let first = add(&mut g, Op::Slice(Slice { start, size, step }), &[table])[0];
            let y = add(&mut g, Op::Binary(BinaryFn::Mul), &[x, first])[0];
            g.add_output("y", y, OutputKind::Gradient);
            g
        };
        let sine = |i: usize, j: usize| ((i * N + j) as f64 + 0.5).sin();
        let table = read(3, &sine);
        let same = |other: &Graph| {
            Comparer::of_real_numbers().compare(&table, other, Ranks::ONE).is_empty()
        };
        assert!(same(&read(8, &|i, j| if i < 3 { sine(i, j) } else { 0.0 })));
        assert!(!same(&read(8, &|i, j| if i < 2 { sine(i, j) } else { 0.0 })));
        assert!(!same(&read(8, &|i, j| if i < 3 { sine(i, j + 1) } else { 0.0 })));
    }

    #[test]
    fn masks_may_exclude_by_two_numbers() {
        let of = |low: f64, high: f64| {
            table(|_, row, key| match key.cmp(&row) {
                std::cmp::Ordering::Greater => high,
                _ if row - key > 1 => low,
                _ => 0.0,
            })
        };
        let least = f64::from(f32::MIN);
        assert!(is_equal(&[of(least, f64::NEG_INFINITY)], &[of(least, least)]));
        assert!(!is_equal(&[of(0.0, f64::NEG_INFINITY)], &[of(least, least)]));
    }
}
