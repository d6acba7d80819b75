//! Monitors the other processes, one thread per connection, and notices those that end without a message.

use super::wire::{DONE, FAILED, NUMBER, SHARE, lost, receive, refuse, transmit};
use super::{Rendezvous, Result, fail};
use crate::CommError;
use std::collections::VecDeque;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

impl Rendezvous {
    /// Receives what rank 0 shares, on a monitored connection.
    pub(super) fn heard(&self) -> Result<Vec<u8>> {
        let end = Instant::now() + self.timeout;
        let mut inbox = self.inbox.0.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(bytes) = inbox.pop_front() {
                return Ok(bytes);
            }
            if let Some(reason) = self.failure() {
                return fail(reason);
            }
            if Instant::now() >= end {
                let seconds = self.timeout.as_secs_f64();
                return fail(format!("rank 0 did not answer within {seconds} s"));
            }
            // A timeout, so that a failure is noticed without a notification.
            let waited = self.inbox.1.wait_timeout(inbox, Duration::from_millis(20));
            inbox = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Begins monitoring: processes that end without a message are noticed; see [`Rendezvous::failure`].
    ///
    /// # Errors
    /// If a connection cannot be monitored.
    pub fn watch(&self) -> Result {
        self.watched.store(true, Ordering::Release);
        for (peer, (rank, stream)) in self.peers.iter().enumerate() {
            let rank = *rank;
            let (numbers, inbox) = (self.numbers.clone(), self.inbox.clone());
            let watched = stream
                .try_clone()
                .and_then(|s| s.set_read_timeout(None).map(|()| s))
                .map_err(|e| CommError::from(lost(rank, &e, self.timeout)));
            let stream = watched?;
            let (failure, done) = (self.failure.clone(), self.done.clone());
            let mut others = Vec::new();
            for (other, stream) in self.peers.iter().filter(|(other, _)| *other != rank) {
                if let Ok(stream) = stream.try_clone() {
                    others.push((*other, stream));
                }
            }
            std::thread::spawn(move || {
                let reason = loop {
                    match receive(&stream) {
                        Ok((DONE, _)) => {
                            done.fetch_add(1, Ordering::Release);
                            return;
                        }
                        Ok((NUMBER, bytes)) => {
                            let Some(bytes) = bytes.first_chunk::<8>() else { continue };
                            let mut said = numbers.0.lock().unwrap_or_else(PoisonError::into_inner);
                            said[peer].push_back(u64::from_le_bytes(*bytes));
                            numbers.1.notify_all();
                        }
                        Ok((SHARE, bytes)) => {
                            let mut heard = inbox.0.lock().unwrap_or_else(PoisonError::into_inner);
                            heard.push_back(bytes);
                            inbox.1.notify_all();
                        }
                        Ok((FAILED, reason)) => {
                            break String::from_utf8_lossy(&reason).into_owned();
                        }
                        Ok(_) => break format!("rank {rank} sent an unexpected message"),
                        Err(_) => {
                            break format!("rank {rank} ended, or its machine cannot be reached");
                        }
                    }
                };
                let mut noted = failure.lock().unwrap_or_else(PoisonError::into_inner);
                if noted.is_none() {
                    *noted = Some(reason.clone());
                    refuse(&others, &reason);
                }
            });
        }
        Ok(())
    }

    /// The maximum of `value` over processes. Every process must call it, and they must be monitored.
    ///
    /// # Errors
    /// If another process fails, or does not call it in time.
    pub fn largest(&self, value: u64) -> Result<u64> {
        let say = |peer: usize, value: u64| {
            let (rank, stream) = &self.peers[peer];
            transmit(stream, NUMBER, &value.to_le_bytes())
                .map_err(|e| CommError::from(lost(*rank, &e, self.timeout)))
        };
        if self.rank != 0 {
            say(0, value)?;
        }
        let end = Instant::now() + self.timeout;
        let mut said = self.numbers.0.lock().unwrap_or_else(PoisonError::into_inner);
        while said.iter().any(VecDeque::is_empty) {
            if let Some(reason) = self.failure() {
                return fail(reason);
            }
            if Instant::now() >= end {
                let silent = said.iter().position(VecDeque::is_empty).unwrap_or_default();
                let (rank, seconds) = (self.peers[silent].0, self.timeout.as_secs_f64());
                return fail(format!("rank {rank} did not answer within {seconds} s"));
            }
            // A timeout, so that a failure is noticed without a notification.
            let pause = Duration::from_millis(20);
            let waited = self.numbers.1.wait_timeout(said, pause);
            said = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        let others = said.iter_mut().filter_map(VecDeque::pop_front).max().unwrap_or_default();
        drop(said);
        let largest = value.max(others);
        if self.rank == 0 {
            (0..self.peers.len()).try_for_each(|peer| say(peer, largest))?;
        }
        Ok(largest)
    }
}
