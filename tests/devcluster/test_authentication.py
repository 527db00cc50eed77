"""Tokens, and what becomes of them."""

import pytest
from torpor_devcluster import Config, DevCluster, User
from torpor_devcluster.clock import SystemClock
from torpor_kubernetes_testing import ApiError, KubeClient


class ShiftedClock(SystemClock):
    """Wall time that tests move forward."""

    shift_s = 0.0

    def now_s(self) -> float:
        return super().now_s() + self.shift_s


async def username(cluster: DevCluster, token: str | None) -> str:
    async with KubeClient(cluster.url, token=token, ca_file=cluster.ca_file) as client:
        review = {"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"}
        answer = await client.create("authentication.k8s.io/v1/selfsubjectreviews", review)
    found: str = answer["status"]["userInfo"]["username"]
    return found


async def test_a_request_without_or_with_a_wrong_token_is_401(cluster: DevCluster) -> None:
    for token in (None, "wrong", "a.b.c", "ä.b"):
        with pytest.raises(ApiError) as error:
            await username(cluster, token)
        assert (error.value.status, error.value.reason) == (401, "Unauthorized")


async def test_health_and_version_need_no_token(cluster: DevCluster) -> None:
    async with KubeClient(cluster.url, ca_file=cluster.ca_file) as nobody:
        assert await nobody.text("/readyz") == "ok"
        assert (await nobody.request("GET", "/version"))["major"] == "1"


async def test_anonymous_requests_are_somebody_where_configured() -> None:
    async with (
        DevCluster(Config(anonymous=True)) as cluster,
        KubeClient(cluster.url, ca_file=cluster.ca_file) as nobody,
    ):
        with pytest.raises(ApiError) as error:
            await nobody.list("v1/pods")
        assert error.value.status == 403
        assert 'User "system:anonymous" cannot list resource "pods"' in str(error.value)


async def test_static_tokens_bring_their_user(cluster: DevCluster) -> None:
    cluster.add_token("secret", User("alice", ("team",)))
    assert await username(cluster, "secret") == "alice"


async def test_an_account_token_ends_with_its_time() -> None:
    clock = ShiftedClock()
    async with DevCluster(Config(clock=clock)) as cluster:
        await cluster.settle()
        token = cluster.service_account_token("default", "default", expiration_s=600)
        assert await username(cluster, token) == "system:serviceaccount:default:default"
        clock.shift_s = 601
        with pytest.raises(ApiError) as error:
            await username(cluster, token)
        assert error.value.status == 401


async def test_an_account_token_ends_with_its_account_also_if_one_of_that_name_comes(
    cluster: DevCluster, dev: KubeClient
) -> None:
    account = {"metadata": {"name": "bob", "namespace": "default"}}
    await dev.create("v1/serviceaccounts", account)
    token = cluster.service_account_token("default", "bob")
    await dev.delete("v1/serviceaccounts", "bob", namespace="default")
    with pytest.raises(ApiError) as error:
        await username(cluster, token)
    assert error.value.status == 401
    await dev.create("v1/serviceaccounts", account)
    with pytest.raises(ApiError) as error:
        await username(cluster, token)
    assert error.value.status == 401


async def test_a_tampered_token_is_refused(cluster: DevCluster) -> None:
    await cluster.settle()
    head, claims, signature = cluster.service_account_token("default", "default").split(".")
    for forged in (f"{head}.{claims}x.{signature}", f"{head}.{claims}.{signature[:-4]}AAAA", f"{head}..{signature}"):
        with pytest.raises(ApiError) as error:
            await username(cluster, forged)
        assert error.value.status == 401


async def test_impersonated_accounts_bring_their_groups_unless_groups_are_named(cluster: DevCluster) -> None:
    async def groups(headers: dict[str, str]) -> list[str]:
        async with KubeClient(
            cluster.url, token=cluster.admin_token, ca_file=cluster.ca_file, headers=headers
        ) as client:
            answer = await client.create("authentication.k8s.io/v1/selfsubjectreviews", {"metadata": {}})
        found: list[str] = answer["status"]["userInfo"]["groups"]
        return sorted(found)

    account = {"Impersonate-User": "system:serviceaccount:ns:bob"}
    assert await groups(account) == ["system:authenticated", "system:serviceaccounts", "system:serviceaccounts:ns"]
    assert await groups({**account, "Impersonate-Group": "team"}) == ["system:authenticated", "team"]
