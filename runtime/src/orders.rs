//! Orders to the ranks of a [trainer](crate::trainer): every rank receives each of them, and one replies.

use crate::divergence::Divergence;
use crate::eval::Sums;
use crate::metrics::StepMetrics;
use crate::save::{Tensors, Version};
use crate::validation::Examples;
use frit_data::Data;
use std::sync::mpsc::{Receiver, Sender};
use std::sync::{Arc, Mutex, PoisonError};

/// What a rank does next.
#[derive(Clone)]
pub(crate) enum Order {
    /// Say that it is ready.
    Begin(Reply<Begun>),
    /// Train on the examples of one step.
    Step(Arc<Data>, Reply<Stepped>),
    /// Evaluate examples, and add to the sums over earlier ones. Without earlier ones, the current parameters are
    /// evaluated from here on.
    Evaluate(Arc<Examples>, Sums, Reply<Sums>),
    /// Give the parameters.
    State(Version, Reply<Tensors>),
    /// Replace parameters by whole tensors in the type of files.
    Load(Arc<Tensors>, Reply<()>),
    /// Save a checkpoint now. Replies what is lost, if anything, and warnings.
    Checkpoint(Reply<(Option<String>, Vec<String>)>),
}

/// Where the reply goes; nowhere, of most ranks.
#[derive(Clone)]
pub(crate) struct Reply<T>(Option<Sender<T>>);

impl<T> Reply<T> {
    pub(crate) fn to(sender: Sender<T>) -> Reply<T> {
        Reply(Some(sender))
    }

    /// Sends it, if someone waits for it.
    pub(crate) fn send(self, value: T) {
        if let Some(sender) = self.0 {
            // Whoever does not wait any more sends no more orders.
            let _ = sender.send(value);
        }
    }
}

impl Order {
    /// The same without a reply.
    fn silent(&self) -> Order {
        match self {
            Order::Begin(_) => Order::Begin(Reply(None)),
            Order::Step(data, _) => Order::Step(Arc::clone(data), Reply(None)),
            Order::Evaluate(examples, sums, _) => {
                Order::Evaluate(Arc::clone(examples), sums.clone(), Reply(None))
            }
            Order::State(version, _) => Order::State(*version, Reply(None)),
            Order::Load(params, _) => Order::Load(Arc::clone(params), Reply(None)),
            Order::Checkpoint(_) => Order::Checkpoint(Reply(None)),
        }
    }
}

/// A rank that is ready.
#[derive(Clone, Debug)]
pub(crate) struct Begun {
    pub(crate) rank: usize,
    /// Steps of the checkpoint that it resumed.
    pub(crate) step: usize,
    pub(crate) warnings: Vec<String>,
}

/// The outcome of a step.
#[derive(Clone, Debug)]
pub(crate) struct Stepped {
    pub(crate) metrics: Option<StepMetrics>,
    /// Why the run has failed.
    pub(crate) ended: Option<Divergence>,
    pub(crate) warnings: Vec<String>,
}

/// The orders as the ranks of this process receive them.
pub(crate) struct Orders(Mutex<Vec<Option<Receiver<Order>>>>);

/// The orders as they are given.
pub(crate) struct Orderer(Vec<Sender<Order>>);

/// A line to each of this many ranks.
pub(crate) fn lines(ranks: usize) -> (Orderer, Orders) {
    let (senders, receivers): (Vec<_>, Vec<_>) =
        (0..ranks).map(|_| std::sync::mpsc::channel()).unzip();
    (Orderer(senders), Orders(Mutex::new(receivers.into_iter().map(Some).collect())))
}

impl Orders {
    /// Those to a rank; each rank takes its own once. A rank that is alone in its process has the only line.
    pub(crate) fn of(&self, rank: usize) -> Receiver<Order> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let n = all.len();
        all[rank % n].take().expect("invariant: a rank takes its orders once")
    }
}

impl Orderer {
    /// Gives an order to all ranks; the first replies. A rank that has ended does not hear it, and its sender of the
    /// reply is dropped.
    pub(crate) fn give(&self, order: Order) {
        for sender in self.0.iter().skip(1) {
            let _ = sender.send(order.silent());
        }
        let _ = self.0[0].send(order);
    }

    /// Ranks of this process.
    pub(crate) fn ranks(&self) -> usize {
        self.0.len()
    }
}
