//! Every rank as a thread of this process.

use super::*;
use crate::comm::launch::Launch;
use std::net::TcpListener;

fn launch(rank: usize, world_size: usize, port: u16) -> Launch {
    let master = Some(("127.0.0.1".to_string(), port));
    Launch { rank, world_size, local_rank: rank, master, by_mpirun: false }
}

/// A port that nothing listened at a moment ago.
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
    // Rank 1 may find rank 0 gone before it was heard.
    assert!(named(&results[0]) && named(&results[2]) && results[1].is_some(), "{results:?}");
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
    assert!(results[0].contains("rank 1 did not come within 0.3 s"), "{results:?}");
}

#[test]
fn a_rank_that_ends_is_noticed_by_all() {
    let results = on_ranks(3, |launch| {
        let meeting = Rendezvous::meet(&launch, "abc", PATIENCE).unwrap();
        if launch.rank == 1 {
            // As a killed process: the connection closes and nothing was said.
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
