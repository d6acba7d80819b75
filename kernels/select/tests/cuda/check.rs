//! Compares the launches of a body with the interpreter.

use crate::emulator::{Order, Task};
use crate::memory::Range;
use frit_ir::interpret::{Options, run};
use frit_ir::ops::Input;
use frit_ir::plan::{Launch, Launches};
use frit_ir::{DType, Graph, Op, Origin, OutputKind, Region, Tensor, TensorType, ValueId};
use frit_select::Selected;
use std::collections::HashMap;

/// A body under construction.
pub(crate) struct Body(pub(crate) Graph);

impl Body {
    pub(crate) fn new() -> Body {
        Body(Graph::new("kernel"))
    }

    pub(crate) fn input(&mut self, ty: &TensorType) -> ValueId {
        let count = self.0.nodes().filter(|(_, n)| matches!(n.op, Op::Input(_))).count();
        self.add(Op::Input(Input { name: count.to_string(), ty: ty.clone() }), &[])[0]
    }

    pub(crate) fn add(&mut self, op: Op, inputs: &[ValueId]) -> Vec<ValueId> {
        self.0.add(op, inputs, Origin::none(), Region::Forward).unwrap_or_else(|e| panic!("{e}"))
    }

    pub(crate) fn outputs(mut self, values: &[ValueId]) -> Graph {
        for (i, value) in values.iter().enumerate() {
            self.0.add_output(&i.to_string(), *value, OutputKind::Result);
        }
        self.0
    }
}

/// The body of one operation on operands of these types.
pub(crate) fn body_of(op: Op, operands: &[&TensorType]) -> Graph {
    let mut body = Body::new();
    let inputs: Vec<ValueId> = operands.iter().map(|ty| body.input(ty)).collect();
    let outputs = body.add(op, &inputs);
    body.outputs(&outputs)
}

/// What is selected for a body; panics if there are no launches.
pub(crate) fn selected_with_kernels(body: &Graph) -> Selected {
    frit_select::cuda(body, frit_select::Options::default())
        .unwrap_or_else(|| panic!("no launches for\n{body}"))
}

/// The launches of a body; panics if there are none.
pub(crate) fn selected(body: &Graph) -> Launches {
    selected_with_kernels(body).entry
}

/// Runs the launches; operands begin `shift` elements behind an aligned address.
fn execute(
    body: &Graph,
    operands: &[Tensor],
    order: Order,
    shift: usize,
    libraries: bool,
) -> (Vec<Vec<u8>>, Option<(i64, i64)>) {
    execute_launches(body, &selected_with_kernels(body), operands, order, shift, libraries)
}

fn execute_launches(
    body: &Graph,
    selected: &Selected,
    operands: &[Tensor],
    order: Order,
    shift: usize,
    libraries: bool,
) -> (Vec<Vec<u8>>, Option<(i64, i64)>) {
    let moved = |ty: &TensorType| shift * ty.dtype.size();
    let reads = operands.iter().map(|t| Range::of(&t.to_bytes(), moved(&t.ty))).collect();
    let types = body.outputs.iter().map(|o| body.ty(o.value));
    let writes = types.map(|ty| Range::new(ty.bytes(), moved(ty))).collect();
    let mut task = Task::new(selected, reads, writes);
    task.run(selected, order, libraries);
    for (operand, range) in operands.iter().zip(&task.reads) {
        assert!(operand.to_bytes() == range.content(), "an operand was overwritten");
    }
    (task.writes.iter().map(|w| w.content().to_vec()).collect(), task.fault())
}

/// Checks that results equal the interpreter's within `tolerance` (relative where larger than 1; 0 requires equal bits)
/// for every order of threads and alignment of operands, with equal bits for equal alignment, with library candidates
/// and without.
pub(crate) fn check_body(body: &Graph, operands: &[Tensor], tolerance: f64) {
    let feeds: HashMap<String, Tensor> =
        operands.iter().enumerate().map(|(i, t)| (i.to_string(), t.clone())).collect();
    let expected = run(body, &feeds, Options::default()).unwrap_or_else(|e| panic!("{e}"));
    let chooses = |l: &&Launch| matches!(l, Launch::Choice(_));
    let choice = selected(body).every_launch().iter().any(chooses);
    let ways = [(0, true), (1, true), (0, false), (1, false)];
    for (shift, libraries) in ways.into_iter().filter(|(_, libraries)| choice || *libraries) {
        let (results, fault) = execute(body, operands, Order::Ascending, shift, libraries);
        let (again, _) = execute(body, operands, Order::Descending, shift, libraries);
        assert!(results == again, "the order of threads changes\n{body}");
        assert_eq!(fault, None, "{body}");
        for (i, ((_, expected), found)) in expected.iter().zip(&results).enumerate() {
            let found = Tensor::from_bytes(expected.ty.clone(), found).unwrap();
            compare(&format!("result {i} of\n{body}"), &found, expected, tolerance);
        }
    }
}

/// The same of these launches, which leave no choice, on aligned operands.
pub(crate) fn check_launches(
    body: &Graph,
    launches: Launches,
    operands: &[Tensor],
    tolerance: f64,
) {
    let feeds: HashMap<String, Tensor> =
        operands.iter().enumerate().map(|(i, t)| (i.to_string(), t.clone())).collect();
    let expected = run(body, &feeds, Options::default()).unwrap_or_else(|e| panic!("{e}"));
    let selected = Selected { entry: launches, generated: vec![] };
    let (results, _) = execute_launches(body, &selected, operands, Order::Ascending, 0, true);
    for (i, ((_, expected), found)) in expected.iter().zip(&results).enumerate() {
        let found = Tensor::from_bytes(expected.ty.clone(), found).unwrap();
        compare(&format!("result {i} of\n{body}"), &found, expected, tolerance);
    }
}

/// The same for one operation.
pub(crate) fn check(op: Op, operands: &[Tensor], tolerance: f64) {
    let types: Vec<&TensorType> = operands.iter().map(|t| &t.ty).collect();
    check_body(&body_of(op, &types), operands, tolerance);
}

/// The result of one operation by its launches.
pub(crate) fn result(op: &Op, operands: &[Tensor]) -> Tensor {
    let types: Vec<&TensorType> = operands.iter().map(|t| &t.ty).collect();
    let body = body_of(op.clone(), &types);
    let (results, _) = execute(&body, operands, Order::Ascending, 0, true);
    Tensor::from_bytes(body.ty(body.outputs[0].value).clone(), &results[0]).unwrap()
}

/// All results of a body by its launches, without libraries.
pub(crate) fn results(body: &Graph, operands: &[Tensor]) -> Vec<Tensor> {
    let (results, _) = execute(body, operands, Order::Ascending, 0, false);
    let types = body.outputs.iter().map(|o| body.ty(o.value).clone());
    types.zip(&results).map(|(ty, bytes)| Tensor::from_bytes(ty, bytes).unwrap()).collect()
}

/// The index that a kernel reports as out of range, and the size of its axis.
pub(crate) fn fault_of(op: Op, operands: &[Tensor]) -> Option<(i64, i64)> {
    let types: Vec<&TensorType> = operands.iter().map(|t| &t.ty).collect();
    execute(&body_of(op, &types), operands, Order::Ascending, 0, true).1
}

fn compare(what: &str, found: &Tensor, expected: &Tensor, tolerance: f64) {
    let (a, b) = (found.to_f64s(), expected.to_f64s());
    for (i, (a, b)) in a.iter().zip(&b).enumerate() {
        let same = a == b || (a.is_nan() && b.is_nan());
        let near = (a - b).abs() <= tolerance * b.abs().max(1.0);
        assert!(same || near, "element {i} is {a}, not {b}: {what}");
    }
}

/// Pseudorandom numbers between -2 and 2.
pub(crate) fn random(dtype: DType, shape: &[usize], seed: u64) -> Tensor {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut next = || random.f64();
    let n = shape.iter().product();
    match dtype.is_float() {
        true => Tensor::floats(dtype, shape, (0..n).map(|_| next() * 4.0 - 2.0).collect()),
        false => {
            Tensor::ints(dtype, shape, (0..n).map(|_| (next() * 200.0) as i64 - 100).collect())
        }
    }
}
