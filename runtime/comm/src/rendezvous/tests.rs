//! Rendezvous with every rank as a thread of this process.

use super::*;
use crate::launch::Launch;
use crate::secret::{Secret, SecretSource};
use std::io::{Read, Write};
use std::net::TcpListener;

fn launch(rank: usize, world_size: usize, port: u16) -> Launch {
    let master = Some(("127.0.0.1".to_string(), port));
    Launch { rank, world_size, local_rank: None, local_size: None, master, by_mpirun: false }
}

/// A port that was free a moment ago.
fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// Every rank on a thread.
fn on_ranks<T: Send>(n: usize, f: impl Fn(Launch) -> T + Sync) -> Vec<T> {
    let port = free_port();
    std::thread::scope(|scope| {
        let f = &f;
        let ranks: Vec<_> = (0..n).map(|r| scope.spawn(move || f(launch(r, n, port)))).collect();
        ranks.into_iter().map(|r| r.join().unwrap()).collect()
    })
}

const PATIENCE: Duration = Duration::from_secs(30);

#[test]
fn all_learn_what_rank_0_says() {
    let results = on_ranks(3, |launch| {
        let meeting = Rendezvous::meet(&launch, "abc", PATIENCE).unwrap();
        let own = format!("from {}", launch.rank).into_bytes();
        meeting.share(own).unwrap()
    });
    assert!(results.iter().all(|r| r == b"from 0"));
}

#[test]
fn all_learn_what_each_says() {
    let results = on_ranks(3, |launch| {
        let meeting = Rendezvous::meet(&launch, "abc", PATIENCE).unwrap();
        meeting.all(&vec![launch.rank as u8; launch.rank]).unwrap()
    });
    assert!(results.iter().all(|r| *r == [vec![], vec![1], vec![2, 2]]));
}

#[test]
fn a_rank_with_another_plan_is_named_to_all() {
    let results = on_ranks(3, |launch| {
        let hash = if launch.rank == 2 { "other" } else { "abc" };
        Rendezvous::meet(&launch, hash, PATIENCE).err().map(|e| e.to_string())
    });
    let named = |e: &Option<String>| e.as_ref().is_some_and(|e| e.contains("rank 2 runs another"));
    assert!(results.iter().all(named), "{results:?}");
}

#[test]
fn a_rank_that_does_not_come_is_named_in_time() {
    let port = free_port();
    let results = std::thread::scope(|scope| {
        let patience = Duration::from_millis(300);
        let ranks: Vec<_> = [0, 2]
            .map(|r| {
                scope.spawn(move || Rendezvous::meet(&launch(r, 3, port), "abc", patience).err())
            })
            .into();
        ranks.into_iter().map(|r| r.join().unwrap().unwrap().to_string()).collect::<Vec<_>>()
    });
    assert!(results[0].contains("rank 1 did not connect within 0.3 s"), "{results:?}");
}

#[test]
fn a_rank_that_ends_is_noticed_by_all() {
    let results = on_ranks(3, |launch| {
        let meeting = Rendezvous::meet(&launch, "abc", PATIENCE).unwrap();
        if launch.rank == 1 {
            // Like a killed process: the connection closes without a message.
            meeting.peers[0].1.shutdown(std::net::Shutdown::Both).unwrap();
            return "rank 1 ended".into();
        }
        meeting.watch().unwrap();
        let end = Instant::now() + PATIENCE;
        while Instant::now() < end {
            if let Some(failure) = meeting.failure() {
                return failure;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        "nothing was noticed".into()
    });
    assert!(results.iter().all(|r| r.starts_with("rank 1 ended")), "{results:?}");
}

#[test]
fn ranks_agree_on_the_largest_number_again_and_again() {
    let results = on_ranks(3, |launch| {
        let meeting = Rendezvous::meet(&launch, "abc", PATIENCE).unwrap();
        meeting.watch().unwrap();
        let rank = launch.rank as u64;
        let agreed: Vec<u64> =
            [rank, 10 - rank, 7].iter().map(|v| meeting.largest(*v).unwrap()).collect();
        meeting.finish().unwrap();
        agreed
    });
    assert_eq!(results, vec![vec![2, 10, 7]; 3]);
}

#[test]
fn who_watches_still_hears_what_rank_0_shares_and_that_it_failed() {
    let results = on_ranks(3, |launch| {
        let meeting = Rendezvous::meet(&launch, "abc", PATIENCE).unwrap();
        meeting.watch().unwrap();
        let shared = meeting.share(format!("from {}", launch.rank).into_bytes()).unwrap();
        if launch.rank == 0 {
            meeting.fail("rank 0 stopped: no memory");
            return (shared, None);
        }
        (shared, meeting.share(vec![]).err().map(|e| e.to_string()))
    });
    assert!(results.iter().all(|(shared, _)| shared == b"from 0"));
    let told =
        |(_, error): &(_, Option<String>)| error.as_deref() == Some("rank 0 stopped: no memory");
    assert!(results[1..].iter().all(told), "{results:?}");
}

#[test]
fn ranks_that_finish_wait_for_each_other_and_do_not_fail() {
    let begun = Instant::now();
    let results = on_ranks(3, |launch| {
        let meeting = Rendezvous::meet(&launch, "abc", PATIENCE).unwrap();
        meeting.watch().unwrap();
        let pause = Duration::from_millis(100 * launch.rank as u64);
        std::thread::sleep(pause);
        (meeting.finish(), begun.elapsed())
    });
    for (finished, after) in results {
        assert!(finished.is_ok() && after >= Duration::from_millis(200), "{finished:?} {after:?}");
    }
}

#[test]
fn a_rank_that_is_dropped_before_it_is_done_is_a_failure() {
    let results = on_ranks(2, |launch| {
        let meeting = Rendezvous::meet(&launch, "abc", PATIENCE).unwrap();
        if launch.rank == 1 {
            return None;
        }
        meeting.watch().unwrap();
        meeting.finish().err().map(|e| e.to_string())
    });
    assert!(results[0].as_ref().is_some_and(|e| e.starts_with("rank 1 ended")), "{results:?}");
}

#[test]
fn a_rank_that_does_not_know_the_secret_is_not_listened_to() {
    let port = free_port();
    let secret = SecretSource::Known(Secret::from_bytes(b"the secret of one job"));
    let other = SecretSource::Known(Secret::from_bytes(b"the secret of another"));
    let results = std::thread::scope(|scope| {
        let meet = |rank, source| {
            let patience = Duration::from_millis(600);
            let met =
                move || Rendezvous::meet_with(&launch(rank, 3, port), source, "abc", patience);
            scope.spawn(move || met().err().map(|e| e.to_string()).unwrap_or_default())
        };
        let ranks = [meet(0, &secret), meet(1, &secret), meet(2, &other)];
        ranks.map(|r| r.join().unwrap())
    });
    let expected = [
        "rank 2 did not connect within 0.6 s to 127.0.0.1",
        "rank 2 did not connect within 0.6 s",
        "its secret differs",
    ];
    for (result, expected) in results.iter().zip(expected) {
        assert!(result.contains(expected), "{results:?}");
    }
    assert!(results[0].contains("1 connection had another secret"), "{results:?}");
}

#[test]
fn strangers_and_the_slow_do_not_disturb_a_meeting() {
    let port = free_port();
    let strangers = std::sync::atomic::AtomicUsize::new(0);
    let met = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        // Some send nothing, some use another protocol, some send only the start of a message.
        let words: [&[u8]; 3] =
            [b"", b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", b"h\xff\xff\xff\xff"];
        for words in words {
            let (strangers, met) = (&strangers, &met);
            scope.spawn(move || {
                let mut open = Vec::new();
                while !met.load(Ordering::Relaxed) {
                    if let Ok(mut stream) = TcpStream::connect(("127.0.0.1", port)) {
                        let _ = stream.write_all(words);
                        strangers.fetch_add(1, Ordering::Relaxed);
                        open.push(stream);
                    }
                    std::thread::sleep(Duration::from_millis(5));
                }
            });
        }
        let begun = Instant::now();
        let ranks: Vec<_> = (0..3)
            .map(|rank| {
                scope.spawn(move || {
                    std::thread::sleep(Duration::from_millis(150 * rank as u64));
                    let meeting =
                        Rendezvous::meet(&launch(rank, 3, port), "abc", PATIENCE).unwrap();
                    meeting.share(b"heard".to_vec()).unwrap()
                })
            })
            .collect();
        let heard: Vec<Vec<u8>> = ranks.into_iter().map(|r| r.join().unwrap()).collect();
        met.store(true, Ordering::Relaxed);
        assert_eq!(heard, vec![b"heard".to_vec(); 3]);
        assert!(begun.elapsed() < PATIENCE);
    });
    assert!(strangers.load(Ordering::Relaxed) > 3);
}

#[test]
fn what_a_rank_says_before_it_proved_itself_is_not_read() {
    let port = free_port();
    std::thread::scope(|scope| {
        let host = scope.spawn(move || {
            Rendezvous::meet(&launch(0, 2, port), "abc", Duration::from_millis(500)).err()
        });
        // The greeting of a rank with another plan would end the job.
        let greeting = b"1 2 other";
        loop {
            let Ok(mut stream) = TcpStream::connect(("127.0.0.1", port)) else {
                std::thread::sleep(Duration::from_millis(5));
                continue;
            };
            let mut answer = [0; 64];
            stream.write_all(&[7; 64]).unwrap();
            stream.write_all(&(greeting.len() as u32).to_le_bytes()).unwrap();
            stream.write_all(greeting).unwrap();
            // A challenge, then only zeros.
            if stream.read_exact(&mut answer).is_ok() {
                assert_eq!(answer[32..], [0; 32]);
            }
            break;
        }
        let error = host.join().unwrap().expect("nobody came").to_string();
        assert!(error.starts_with("rank 1 did not connect within 0.5 s"), "{error}");
    });
}

#[test]
fn rank_0_listens_at_the_address_that_is_asked_for_and_no_other() {
    let port = free_port();
    let there = |host: &str| Launch { master: Some((host.into(), port)), ..launch(0, 2, port) };
    let secret = SecretSource::Known(Secret::from_bytes(b"the secret of one job"));
    let patience = Duration::from_millis(400);
    std::thread::scope(|scope| {
        let (asked, secret) = (there("127.0.0.2"), &secret);
        let host =
            scope.spawn(move || Rendezvous::meet_with(&asked, secret, "abc", patience).err());
        std::thread::sleep(Duration::from_millis(150));
        assert!(TcpStream::connect(("127.0.0.1", port)).is_err());
        assert!(TcpStream::connect(("127.0.0.2", port)).is_ok());
        assert!(host.join().unwrap().is_some());
    });
    // A documentation address, which no machine has.
    let error = Rendezvous::meet_with(&there("192.0.2.1"), &secret, "abc", patience).err();
    let error = error.expect("cannot listen there").to_string();
    assert!(error.contains("cannot listen at 192.0.2.1"), "{error}");
}
