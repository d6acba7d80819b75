//! Attention and its gradient.

use super::places;
use crate::memory::{load, store};
use frit_cuda::cudnn::attention_nodes;
use frit_cuda::cudnn::nodes::{Function, Node, Place, Tensor};
use frit_ir::DType;
use frit_ir::plan::{Operation, OperationKind, Strided};

/// Elements per vector access of the engines.
const AT_ONCE: usize = 8;

/// Checks the requirements of cuDNN on attention.
fn check(operation: &Operation, rows: &[usize]) {
    let gradient = matches!(operation.kind, OperationKind::AttentionGrad { .. });
    let most = if gradient { 128 } else { 256 };
    let element = operation.tensors[0].dtype;
    assert!(element.is_low_precision(), "{operation}");
    for (i, tensor) in operation.tensors.iter().enumerate() {
        let [_, _, length, size] = tensor.sizes[..] else { panic!("four axes: {operation}") };
        if rows.contains(&i) {
            let [_, heads, queries, _] = tensor.sizes[..] else { unreachable!() };
            assert_eq!((tensor.dtype, size), (DType::F32, 1), "{operation}");
            assert_eq!(tensor.strides, [heads * queries, queries, 1, 1], "{operation}");
            continue;
        }
        if i == 10 {
            let [_, heads, queries, _] = tensor.sizes[..] else { unreachable!() };
            let strides = [heads * queries * size, queries * size, size, 1];
            assert_eq!((tensor.dtype, &tensor.strides[..]), (DType::F32, &strides[..]));
            continue;
        }
        assert_eq!(tensor.dtype, element, "{operation}");
        assert!(size.is_multiple_of(AT_ONCE) && size <= most, "{operation}");
        assert_eq!(tensor.strides[3], 1, "{operation}");
        assert!(tensor.strides[..3].iter().all(|n| n.is_multiple_of(AT_ONCE)), "{operation}");
        assert!(!gradient || length.is_multiple_of(128), "{operation}");
    }
}

/// Computes cuDNN's operation graph node by node, as its documentation defines it; every tensor is rounded to its type.
pub(super) fn run(operation: &Operation, tensors: &mut [Vec<u8>]) {
    let rows: &[usize] = match operation.kind {
        OperationKind::Attention { .. } => &[4],
        _ => &[8, 9],
    };
    check(operation, rows);
    let graph = attention_nodes(operation);
    let mut values: Vec<Option<Array>> = Vec::new();
    for Tensor { shape, place } in &graph.tensors {
        values.push(match *place {
            Place::Memory(i) if operation.results().contains(&i) => None,
            Place::Memory(i) => Some(Array {
                sizes: sizes(shape),
                values: places(shape)
                    .into_iter()
                    .map(|at| load(&tensors[i], shape.dtype, at))
                    .collect(),
            }),
            Place::Between => None,
            Place::Value(x) => Some(Array { sizes: [1; 4], values: vec![x.into()] }),
        });
    }
    for Node { function, from, to } in &graph.nodes {
        let operands: Vec<&Array> =
            from.iter().map(|i| values[*i].as_ref().expect("computed before")).collect();
        let shape = &graph.tensors[*to].shape;
        if *function == Function::Transpose {
            let [b, h, row, column] = shape.strides[..] else { panic!("four axes") };
            assert_eq!(graph.tensors[from[0]].shape.strides, [b, h, column, row], "{operation}");
        }
        let mut result = compute(*function, &operands, sizes(shape));
        result.values.iter_mut().for_each(|x| *x = rounded(shape.dtype, *x));
        if let Place::Memory(i) = graph.tensors[*to].place {
            for (at, x) in places(shape).into_iter().zip(&result.values) {
                store(&mut tensors[i], shape.dtype, at, *x);
            }
        }
        assert!(values[*to].replace(result).is_none(), "a tensor is written once");
    }
    let written: Vec<usize> = operation.results().to_vec();
    let reached = |i: &usize| {
        graph.tensors.iter().zip(&values).any(|(t, v)| t.place == Place::Memory(*i) && v.is_some())
    };
    assert!(written.iter().all(reached), "{operation}");
}

/// Numbers on a grid, the last axis innermost.
struct Array {
    sizes: [usize; 4],
    values: Vec<f64>,
}

impl Array {
    /// The number at an index; axes of one element broadcast.
    fn at(&self, index: [usize; 4]) -> f64 {
        self.values[offset(self.sizes, index)]
    }
}

/// The offset of an index in a grid whose axes of one element broadcast.
fn offset(sizes: [usize; 4], index: [usize; 4]) -> usize {
    sizes.iter().zip(index).fold(0, |at, (size, i)| at * size + if *size == 1 { 0 } else { i })
}

fn sizes(tensor: &Strided) -> [usize; 4] {
    tensor.sizes[..].try_into().expect("four axes")
}

/// Every index of a grid.
fn indices(sizes: [usize; 4]) -> impl Iterator<Item = [usize; 4]> {
    (0..sizes.iter().product()).map(move |mut at: usize| {
        let mut index = [0; 4];
        for axis in (0..4).rev() {
            (index[axis], at) = (at % sizes[axis], at / sizes[axis]);
        }
        index
    })
}

fn compute(function: Function, from: &[&Array], to: [usize; 4]) -> Array {
    let values = match function {
        Function::MatMul => matmul(from[0], from[1], to),
        Function::Transpose => {
            assert_eq!(from[0].sizes, [to[0], to[1], to[3], to[2]]);
            indices(to).map(|[b, h, i, j]| from[0].at([b, h, j, i])).collect()
        }
        Function::Sum => reduced(from[0], to, 0.0, |a, b| a + b),
        Function::Max => reduced(from[0], to, f64::NEG_INFINITY, f64::max),
        pointwise => indices(to)
            .map(|index| {
                let x: Vec<f64> = from.iter().map(|operand| operand.at(index)).collect();
                match pointwise {
                    Function::Add => x[0] + x[1],
                    Function::Mul => x[0] * x[1],
                    Function::Div => x[0] / x[1],
                    Function::Sub => x[0] - x[1],
                    Function::Exp => x[0].exp(),
                    Function::Log => x[0].ln(),
                    Function::Identity => x[0],
                    Function::AtLeast => f64::from(x[0] >= x[1]),
                    Function::Index(axis) => index[axis] as f64,
                    Function::Select if x[2] != 0.0 => x[0],
                    Function::Select => x[1],
                    _ => unreachable!("not pointwise"),
                }
            })
            .collect(),
    };
    Array { sizes: to, values }
}

fn matmul(a: &Array, b: &Array, to: [usize; 4]) -> Vec<f64> {
    let ([batches, heads, m, k], [_, groups, _, n]) = (a.sizes, b.sizes);
    assert_eq!((b.sizes[0], b.sizes[2], heads % groups), (batches, k, 0));
    assert_eq!(to, [batches, heads, m, n]);
    let shared = heads / groups;
    let element = |[batch, h, i, j]: [usize; 4]| {
        let terms = (0..k).map(|c| a.at([batch, h, i, c]) * b.at([batch, h / shared, c, j]));
        terms.sum()
    };
    indices(to).map(element).collect()
}

fn reduced(x: &Array, to: [usize; 4], first: f64, f: fn(f64, f64) -> f64) -> Vec<f64> {
    let mut all = vec![first; to.iter().product()];
    for index in indices(x.sizes) {
        let place: Vec<usize> = (0..4).map(|axis| index[axis] * to[axis] / x.sizes[axis]).collect();
        let result = &mut all[offset(to, place.try_into().expect("four axes"))];
        *result = f(*result, x.at(index));
    }
    all
}

/// The nearest number of a type.
fn rounded(dtype: DType, x: f64) -> f64 {
    match dtype {
        DType::F32 => f64::from(x as f32),
        DType::F16 | DType::BF16 => {
            let mut bytes = [0; 2];
            store(&mut bytes, dtype, 0, x);
            load(&bytes, dtype, 0)
        }
        _ => x,
    }
}
