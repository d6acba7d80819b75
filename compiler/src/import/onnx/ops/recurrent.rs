//! LSTM, GRU and RNN, unrolled over time.
//!
//! The inputs of all steps are multiplied by the weights in one matmul; each step has only the matmul with the state and the
//! gates. Legend: `T` steps, `B` batch, `I` input, `H` hidden, `D` directions, `G` gates.
//! Source: ONNX LSTM-14, GRU-14, RNN-14.

use super::super::context::{Fault, NodeContext, Outcome, misfit};
use super::layout::{join, parts, permute};
use super::{Operator, op};
use frit_ir::ops::{BinaryFn, Clip, CompareFn, MatMul, Slice, UnaryFn};
use frit_ir::{DType, Op, Shape, Tensor, TensorType, ValueId};

const ATTRIBUTES: &[&str] = &[
    "activations",
    "activation_alpha",
    "activation_beta",
    "clip",
    "direction",
    "hidden_size",
    "input_forget",
    "layout",
    "linear_before_reset",
];

pub(super) const OPERATORS: &[Operator] = &[
    op("GRU", ATTRIBUTES, |cx| recurrent(cx, Kind::Gru)),
    op("LSTM", ATTRIBUTES, |cx| recurrent(cx, Kind::Lstm)),
    op("RNN", ATTRIBUTES, |cx| recurrent(cx, Kind::Rnn)),
];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Gru,
    Lstm,
    Rnn,
}

impl Kind {
    fn gates(self) -> usize {
        match self {
            Kind::Gru => 3,
            Kind::Lstm => 4,
            Kind::Rnn => 1,
        }
    }

    /// Activations of one direction.
    fn activations(self) -> &'static [&'static str] {
        match self {
            Kind::Gru => &["Sigmoid", "Tanh"],
            Kind::Lstm => &["Sigmoid", "Tanh", "Tanh"],
            Kind::Rnn => &["Tanh"],
        }
    }
}

/// One direction of a layer.
struct Cell<'c, 'a> {
    cx: &'c mut NodeContext<'a>,
    kind: Kind,
    hidden: usize,
    activations: Vec<UnaryFn>,
    clip: Option<f64>,
    /// `[G·H, H]`
    recurrence: ValueId,
    /// Bias of the matmul with the state, where that is not added to the input's.
    state_bias: Option<ValueId>,
    /// `[3·H]`
    peephole: Option<ValueId>,
}

fn recurrent(cx: &mut NodeContext<'_>, kind: Kind) -> Outcome {
    let (mut x, w, r) = (cx.input(0)?, cx.input(1)?, cx.input(2)?);
    let (bias, lens) = (cx.optional(3)?, cx.optional(4)?);
    let batch_first = cx.int("layout", 0) != 0;
    if batch_first {
        x = permute(cx, x, vec![1, 0, 2])?;
    }
    let (&[t, b, i], &[d, rows, wi]) = (cx.dims(x).as_slice(), cx.dims(w).as_slice()) else {
        return misfit("x and w need 3 axes each");
    };
    let h = rows / kind.gates();
    let fits = wi == i && cx.dims(r) == [d, rows, h] && rows == h * kind.gates() && d > 0;
    if !fits || t == 0 || cx.has("hidden_size") && cx.int("hidden_size", 0) != h as i64 {
        return misfit(format!("w {:?} and r {:?} do not fit x", cx.dims(w), cx.dims(r)));
    }
    let direction = cx.text("direction", "forward");
    if (direction == "bidirectional") != (d == 2) || d > 2 {
        return misfit(format!("direction \"{direction}\" with {d} directions"));
    }
    if cx.int("input_forget", 0) != 0 {
        return Err(Fault::Attribute("input_forget".into()));
    }
    let lens = match lens {
        // Sequences of full length need no care.
        Some(lens) => match cx.graph.constant(lens).and_then(Tensor::as_ints) {
            Some(known) if known.iter().all(|n| *n == t as i64) => None,
            _ if direction == "forward" => Some(lens),
            _ => return Err(Fault::Attribute("sequence_lens of a reverse direction".into())),
        },
        None => None,
    };
    cx.nodes(t)?;
    let names = cx.strings("activations");
    let (mut all, mut last_h, mut last_c) = (Vec::new(), Vec::new(), Vec::new());
    for direction_index in 0..d {
        let reverse = direction == "reverse" || direction_index == 1;
        let at = |cx: &mut NodeContext<'_>, v: ValueId| element(cx, v, direction_index);
        let (weight, recurrence) = (at(cx, w)?, at(cx, r)?);
        let initial = |cx: &mut NodeContext<'_>, i: usize| -> Result<ValueId, Fault> {
            match cx.optional(i)? {
                Some(v) => {
                    let v = if batch_first { permute(cx, v, vec![1, 0, 2])? } else { v };
                    element(cx, v, direction_index)
                }
                None => {
                    cx.room(&[b, h])?;
                    let ty = TensorType::new(cx.ty(x).dtype, [b, h]);
                    cx.constant(Tensor::splat(ty, 0.0))
                }
            }
        };
        let mut state = initial(cx, 5)?;
        let mut memory = if kind == Kind::Lstm { Some(initial(cx, 6)?) } else { None };
        let flat = cx.reshape(x, vec![t * b, i])?;
        let matmul = MatMul { trans_a: false, trans_b: true, out: None };
        let mut inputs = cx.emit(Op::MatMul(matmul), &[flat, weight])?;
        let mut state_bias = None;
        if let Some(bias) = bias {
            let bias = at(cx, bias)?;
            let halves = parts(cx, bias, 0, vec![rows, rows])?;
            inputs = cx.emit(Op::Binary(BinaryFn::Add), &[inputs, halves[0]])?;
            if kind == Kind::Gru && cx.int("linear_before_reset", 0) != 0 {
                state_bias = Some(halves[1]);
            } else {
                inputs = cx.emit(Op::Binary(BinaryFn::Add), &[inputs, halves[1]])?;
            }
        }
        let inputs = cx.reshape(inputs, vec![t, b, rows])?;
        let steps = parts(cx, inputs, 0, vec![1; t])?;
        let peephole = match cx.optional(7)? {
            Some(p) if kind == Kind::Lstm => Some(at(cx, p)?),
            _ => None,
        };
        let n = kind.activations().len();
        let given = names.get(direction_index * n..(direction_index + 1) * n);
        let activations: Result<Vec<UnaryFn>, Fault> = match given {
            Some(names) => names.iter().map(|name| activation(name)).collect(),
            None => kind.activations().iter().map(|name| activation(name)).collect(),
        };
        let clip = cx.has("clip").then(|| cx.float("clip", 0.0)).filter(|c| *c > 0.0);
        let activations = activations?;
        let mut cell =
            Cell { cx, kind, hidden: h, activations, clip, recurrence, state_bias, peephole };
        let mut outputs = vec![None; t];
        for step in 0..t {
            let step = if reverse { t - 1 - step } else { step };
            let input = cell.cx.reshape(steps[step], vec![b, rows])?;
            let (next, next_memory) = cell.step(input, state, memory)?;
            let mut output = next;
            match lens {
                None => (state, memory) = (next, next_memory),
                Some(lens) => {
                    let on = running(cell.cx, lens, step, b)?;
                    let zero = cell.cx.scalar_like(next, 0.0)?;
                    output = cell.cx.emit(Op::Select, &[on, next, zero])?;
                    state = cell.cx.emit(Op::Select, &[on, next, state])?;
                    if let (Some(new), Some(old)) = (next_memory, memory) {
                        memory = Some(cell.cx.emit(Op::Select, &[on, new, old])?);
                    }
                }
            }
            outputs[step] = Some(cell.cx.reshape(output, vec![1, 1, b, h])?);
        }
        let outputs: Vec<ValueId> = outputs.into_iter().flatten().collect();
        all.push(join(cx, &outputs, 0)?);
        last_h.push(cx.reshape(state, vec![1, b, h])?);
        if let Some(memory) = memory {
            last_c.push(cx.reshape(memory, vec![1, b, h])?);
        }
    }
    // y [T, D, B, H], y_h and y_c [D, B, H]; with the batch in front [B, T, D, H] and [B, D, H].
    let mut y = join(cx, &all, 1)?;
    let mut finals = vec![join(cx, &last_h, 0)?];
    if kind == Kind::Lstm {
        finals.push(join(cx, &last_c, 0)?);
    }
    if batch_first {
        y = permute(cx, y, vec![2, 0, 1, 3])?;
        for value in &mut finals {
            *value = permute(cx, *value, vec![1, 0, 2])?;
        }
    }
    Ok(std::iter::once(y).chain(finals).map(Into::into).collect())
}

fn activation(name: &str) -> Result<UnaryFn, Fault> {
    match name {
        "Sigmoid" => Ok(UnaryFn::Sigmoid),
        "Tanh" => Ok(UnaryFn::Tanh),
        "Relu" => Ok(UnaryFn::Relu),
        "Softplus" => Ok(UnaryFn::Softplus),
        other => Err(Fault::Attribute(format!("activation \"{other}\""))),
    }
}

/// Element `at` of the first axis.
fn element(cx: &mut NodeContext<'_>, x: ValueId, at: usize) -> Result<ValueId, Fault> {
    let dims = cx.dims(x);
    let Some((&n, rest)) = dims.split_first() else { return misfit("an operand is a scalar") };
    let rest = rest.to_vec();
    if at >= n {
        return misfit(format!("an operand has {n} directions"));
    }
    let mut part = x;
    if n > 1 {
        let mut start = vec![0; dims.len()];
        start[0] = at;
        let size = std::iter::once(1).chain(rest.iter().copied()).collect();
        part = cx.emit(Op::Slice(Slice { start, size, step: vec![1; dims.len()] }), &[x])?;
    }
    cx.reshape(part, rest)
}

/// Whether step `step` is within each sequence: `[B, 1]`.
fn running(
    cx: &mut NodeContext<'_>,
    lens: ValueId,
    step: usize,
    b: usize,
) -> Result<ValueId, Fault> {
    let lens = cx.cast(lens, DType::I64)?;
    let step = cx.constant(Tensor::ints(DType::I64, Shape::scalar(), vec![step as i64]))?;
    let on = cx.emit(Op::Compare(CompareFn::Gt), &[lens, step])?;
    cx.reshape(on, vec![b, 1])
}

impl Cell<'_, '_> {
    fn add(&mut self, a: ValueId, b: ValueId) -> Result<ValueId, Fault> {
        self.cx.emit(Op::Binary(BinaryFn::Add), &[a, b])
    }

    fn mul(&mut self, a: ValueId, b: ValueId) -> Result<ValueId, Fault> {
        self.cx.emit(Op::Binary(BinaryFn::Mul), &[a, b])
    }

    /// Activation `i`, of the clipped value.
    fn activate(&mut self, i: usize, mut x: ValueId) -> Result<ValueId, Fault> {
        if let Some(c) = self.clip {
            x = self.cx.emit(Op::Clip(Clip { min: Some(-c), max: Some(c) }), &[x])?;
        }
        self.cx.emit(Op::Unary(self.activations[i]), &[x])
    }

    /// `state · weightᵀ`
    fn matmul(&mut self, state: ValueId, weight: ValueId) -> Result<ValueId, Fault> {
        let op = MatMul { trans_a: false, trans_b: true, out: None };
        self.cx.emit(Op::MatMul(op), &[state, weight])
    }

    /// The state, and the memory of an LSTM, after one step with `input` of `[B, G·H]`.
    fn step(
        &mut self,
        input: ValueId,
        state: ValueId,
        memory: Option<ValueId>,
    ) -> Result<(ValueId, Option<ValueId>), Fault> {
        match (self.kind, memory) {
            (Kind::Lstm, Some(memory)) => {
                self.lstm(input, state, memory).map(|(h, c)| (h, Some(c)))
            }
            (Kind::Gru, _) => self.gru(input, state).map(|h| (h, None)),
            _ => {
                let matmul = self.matmul(state, self.recurrence)?;
                let sum = self.add(input, matmul)?;
                Ok((self.activate(0, sum)?, None))
            }
        }
    }

    /// Gates input, output, forget, cell.
    fn lstm(
        &mut self,
        input: ValueId,
        state: ValueId,
        memory: ValueId,
    ) -> Result<(ValueId, ValueId), Fault> {
        let h = self.hidden;
        let matmul = self.matmul(state, self.recurrence)?;
        let sum = self.add(input, matmul)?;
        let mut gates = parts(self.cx, sum, 1, vec![h; 4])?;
        let peepholes = match self.peephole {
            Some(p) => Some(parts(self.cx, p, 0, vec![h; 3])?),
            None => None,
        };
        if let Some(p) = &peepholes {
            for (gate, p) in [(0, p[0]), (2, p[2])] {
                let seen = self.mul(memory, p)?;
                gates[gate] = self.add(gates[gate], seen)?;
            }
        }
        let (i, f) = (self.activate(0, gates[0])?, self.activate(0, gates[2])?);
        let c = self.activate(1, gates[3])?;
        let (kept, new) = (self.mul(f, memory)?, self.mul(i, c)?);
        let memory = self.add(kept, new)?;
        if let Some(p) = &peepholes {
            let seen = self.mul(memory, p[1])?;
            gates[1] = self.add(gates[1], seen)?;
        }
        let o = self.activate(0, gates[1])?;
        let shown = self.activate(2, memory)?;
        Ok((self.mul(o, shown)?, memory))
    }

    /// Gates update, reset, hidden.
    fn gru(&mut self, input: ValueId, state: ValueId) -> Result<ValueId, Fault> {
        let h = self.hidden;
        let inputs = parts(self.cx, input, 1, vec![2 * h, h])?;
        let weights = parts(self.cx, self.recurrence, 0, vec![2 * h, h])?;
        let biases = match self.state_bias {
            Some(b) => Some(parts(self.cx, b, 0, vec![2 * h, h])?),
            None => None,
        };
        let matmul = self.matmul(state, weights[0])?;
        let mut sum = self.add(inputs[0], matmul)?;
        if let Some(b) = &biases {
            sum = self.add(sum, b[0])?;
        }
        let sum = self.activate(0, sum)?;
        let gates = parts(self.cx, sum, 1, vec![h, h])?;
        let (update, reset) = (gates[0], gates[1]);
        let matmul = if self.cx.int("linear_before_reset", 0) != 0 {
            let mut matmul = self.matmul(state, weights[1])?;
            if let Some(b) = &biases {
                matmul = self.add(matmul, b[1])?;
            }
            self.mul(reset, matmul)?
        } else {
            let state = self.mul(reset, state)?;
            self.matmul(state, weights[1])?
        };
        let sum = self.add(inputs[1], matmul)?;
        let new = self.activate(1, sum)?;
        // new + update·(state − new)
        let difference = self.cx.emit(Op::Binary(BinaryFn::Sub), &[state, new])?;
        let kept = self.mul(update, difference)?;
        self.add(new, kept)
    }
}
